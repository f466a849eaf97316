// A process group for the device, ordered by streams as NCCL's is.
//
// A call enqueues and returns. With asyncOp=False the work is on the caller's stream; otherwise on
// a stream of the group that first waits for the caller's, and `wait` makes the caller's stream
// wait, never the host. Bytes travel through a gloo group, on shadow memory, when a stream gets
// there. Sums are made here, in the order of ranks, in float32 for narrower types.

#include "group.h"

#include <ATen/ATen.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>

#include "backend.h"
#include "gil.h"

namespace testdev {
namespace {

using c10d::Backend;
using c10d::ReduceOp;
using Finish = std::function<void()>;
using Start = std::function<Finish()>;  // starts the messages; what it returns waits for them
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// Whether calls with asyncOp=False return a Work, as they do with some versions of NCCL's backend.
std::atomic<bool> returns_work{true};
// Whether calls run on the group's stream even with asyncOp=False, as backends of other vendors may:
// what orders their result is the Work alone.
std::atomic<bool> ignores_async_op{false};

// How long ranks wait for each other when a group is split, which NCCL does for ever.
constexpr std::chrono::milliseconds kMeetingTimeout{5000};

struct GroupOptions final : Backend::Options {
  explicit GroupOptions(std::chrono::milliseconds timeout) : Options("testccl", timeout) {}
  // Of newer versions of torch; the same as `__deepcopy__` in Python.
  c10::intrusive_ptr<Options> clone() const { return c10::make_intrusive<GroupOptions>(*this); }
  bool high_priority = false;  // stands for what a user chooses
};

// Makes the gloo group below a group that is split off: of (store, rank, size, timeout).
using MakeInner = std::function<c10::intrusive_ptr<Backend>(
    c10::intrusive_ptr<c10d::Store>, int, int, std::chrono::milliseconds)>;
MakeInner& make_inner() {
  static auto* function = new MakeInner();
  return *function;
}

std::atomic<uint64_t> num_communicators{0};

// Communication of one kind runs in the order of the calls, also from several streams.
struct Lane {
  Stream& stream = new_stream();
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t issued = 0;
  uint64_t turn = 0;
};

class StreamWork final : public c10d::Work {
 public:
  StreamWork(Event event, Tensors kept, bool on_host)
      : event_(std::move(event)), kept_(std::move(kept)), on_host_(on_host) {}
  bool isCompleted() override { return event_.done(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { event_.block(this_stream()); }
  bool wait(std::chrono::milliseconds) override {
    if (on_host_) {
      event_.wait();
    } else {
      synchronize();
    }
    kept_.clear();
    return true;
  }

 private:
  Event event_;
  Tensors kept_;  // until somebody waits: their memory is not ordered by the caller's stream
  bool on_host_;
};

at::Tensor bytes_of(const at::Tensor& shadowed) {
  return at::from_blob(
      shadowed.data_ptr(), {static_cast<int64_t>(shadowed.nbytes())}, at::TensorOptions(at::kByte));
}

at::Tensor operand(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  return shadow_tensor(tensor);
}

Tensors operands(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(operand(tensor));
  return all;
}

// Sums `terms`, tensors of one shape, into `out`.
void reduce_into(const at::Tensor& out, const Tensors& terms, const ReduceOp& operation) {
  const auto dtype = out.scalar_type();
  const bool narrow = at::isFloatingType(dtype) && at::elementSize(dtype) < 4;
  const auto wide = narrow ? at::kFloat : dtype;
  at::Tensor sum = terms[0].to(wide, false, /*copy=*/true);
  double factor = 1;
  if (operation == ReduceOp::PREMUL_SUM) {
    const auto& extra =
        *static_cast<const c10d::NCCLPreMulSumSupplement*>(operation.supplement_.get());
    factor = extra.tensor_factor.defined() ? shadow_tensor(extra.tensor_factor).item<double>()
                                           : extra.double_factor;
    sum.mul_(factor);
  }
  for (size_t i = 1; i < terms.size(); ++i) {
    const at::Tensor term = terms[i].to(wide);
    switch (operation) {
      case ReduceOp::SUM:
      case ReduceOp::AVG: sum.add_(term); break;
      case ReduceOp::PREMUL_SUM: sum.add_(term, factor); break;
      case ReduceOp::PRODUCT: sum.mul_(term); break;
      case ReduceOp::MIN: sum = at::minimum(sum, term); break;
      case ReduceOp::MAX: sum = at::maximum(sum, term); break;
      default: TORCH_CHECK(false, "testccl: this reduction is not supported");
    }
  }
  if (operation == ReduceOp::AVG) sum.div_(static_cast<int64_t>(terms.size()));
  out.copy_(sum.view_as(out));
}

class Group final : public Backend {
 public:
  Group(c10::intrusive_ptr<Backend> inner, c10::intrusive_ptr<GroupOptions> options)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        options_(std::move(options)) {}

  const std::string getBackendName() const override { return "testccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  // As with NCCL, all ranks of a group have to come when it is split, and it has to be idle.
  bool supportsSplitting() const override { return true; }
  void meet() {
    const uint64_t ticket = lane_.issued++;
    std::exception_ptr error;
    without_gil([&] {
      {
        std::unique_lock<std::mutex> lock(lane_.mutex);
        lane_.changed.wait(lock, [&] { return lane_.turn == ticket; });
      }
      try {
        c10d::BarrierOptions options;
        options.timeout = kMeetingTimeout;
        inner_->barrier(options)->wait(kMeetingTimeout);
      } catch (...) {
        error = std::current_exception();
      }
      std::lock_guard<std::mutex> lock(lane_.mutex);
      ++lane_.turn;
      lane_.changed.notify_all();
    });
    if (error) std::rethrow_exception(error);
  }
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    TORCH_CHECK(connected_, "testccl: a group without a communicator cannot be split");
    meet();
    const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
    if (mine == ranks.end()) return nullptr;
    auto chosen = c10::dynamic_intrusive_pointer_cast<GroupOptions>(options);
    TORCH_CHECK(chosen, "options not of testccl");
    const int rank = static_cast<int>(mine - ranks.begin());
    const int size = static_cast<int>(ranks.size());
    auto made = c10::make_intrusive<Group>(
        make_inner()(store, rank, size, chosen->timeout), std::move(chosen));
    made->connect();
    return made;
  }
  void eagerConnectSingleDevice(at::Device) override { connect(); }
  // The communicator: NCCL makes it at the first collective, or when asked to, or by a split.
  void connect() {
    if (!connected_.exchange(true)) ++num_communicators;
  }
  bool connected() const { return connected_; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return lane_.issued; }

  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto starts = std::move(together_);
    auto kept = std::move(together_kept_);
    together_.clear();
    together_kept_.clear();
    const bool async = together_async_;
    return launch(async, lane_, all_of(std::move(starts)), std::move(kept));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    std::vector<Start> starts;
    for (const auto& tensor : tensors) starts.push_back(sum(operand(tensor), options.reduceOp));
    return call(options.asyncOp, all_of(std::move(starts)), tensors);
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    at::Tensor whole = operand(tensors[0]);
    const bool root = options.rootRank == getRank();
    Start start = [this, whole, root, operation = options.reduceOp]() -> Finish {
      at::Tensor out = root ? whole : at::empty_like(whole);
      at::Tensor mine = whole.clone();
      reduce_into(out, gathered(mine), operation);
      return {};
    };
    return call(options.asyncOp, std::move(start), tensors);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Start start = [this, all = operands(tensors), options]() -> Finish {
      for (const auto& tensor : all) broadcast_bytes(tensor, options.rootRank);
      return {};
    };
    return call(options.asyncOp, std::move(start), tensors);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    Tensors kept = outputs[0];
    kept.push_back(inputs[0]);
    auto start = gather_to_each(operands(outputs[0]), operand(inputs[0]));
    return call(options.asyncOp, std::move(start), kept);
  }

  WorkPtr _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return call(options.asyncOp, gather_into(operand(output), operand(input)), {output, input});
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Start> starts;
    Tensors kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    for (size_t i = 0; i < outputs.size(); ++i)
      starts.push_back(gather_into(operand(outputs[i]), operand(inputs[i])));
    return call(options.asyncOp, all_of(std::move(starts)), kept);
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const bool root = options.rootRank == getRank();
    Tensors outs = root ? operands(outputs[0]) : Tensors{};
    Tensors kept = root ? outputs[0] : Tensors{};
    kept.push_back(inputs[0]);
    auto start = gather_to_each(std::move(outs), operand(inputs[0]));
    return call(options.asyncOp, std::move(start), kept);
  }

  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    const bool root = options.rootRank == getRank();
    Tensors ins = root ? operands(inputs[0]) : Tensors{};
    Tensors kept = root ? inputs[0] : Tensors{};
    kept.push_back(outputs[0]);
    Start start = [this, ins, out = operand(outputs[0]), options]() -> Finish {
      at::Tensor all = ins.empty()
          ? at::empty({getSize() * static_cast<int64_t>(out.nbytes())}, at::kByte)
          : flat(ins);
      broadcast_bytes(all, options.rootRank);
      bytes_of(out).copy_(all.chunk(getSize())[getRank()]);
      return {};
    };
    return call(options.asyncOp, std::move(start), kept);
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    Tensors kept = inputs[0];
    kept.push_back(outputs[0]);
    Start start = [this, out = operand(outputs[0]), ins = operands(inputs[0]),
                   operation = options.reduceOp]() -> Finish {
      std::vector<int64_t> sent;
      for (const auto& tensor : ins) sent.push_back(static_cast<int64_t>(tensor.nbytes()));
      scatter_sums(out, flat(ins), sent, operation);
      return {};
    };
    return call(options.asyncOp, std::move(start), kept);
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto start = sum_scatter(operand(output), operand(input), options.reduceOp);
    return call(options.asyncOp, std::move(start), {output, input});
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Start> starts;
    Tensors kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    for (size_t i = 0; i < outputs.size(); ++i)
      starts.push_back(sum_scatter(operand(outputs[i]), operand(inputs[i]), options.reduceOp));
    return call(options.asyncOp, all_of(std::move(starts)), kept);
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    const auto received = split_bytes(output, output_sizes);
    const auto sent = split_bytes(input, input_sizes);
    Start start = [this, out = operand(output), in = operand(input), received, sent]() -> Finish {
      at::Tensor to = bytes_of(out), from = bytes_of(in);
      exchange(to, from, received, sent);
      return {};
    };
    return call(options.asyncOp, std::move(start), {output, input});
  }

  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    Tensors kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    Start start = [this, outs = operands(outputs), ins = operands(inputs)]() -> Finish {
      std::vector<int64_t> received, sent;
      for (const auto& tensor : outs) received.push_back(static_cast<int64_t>(tensor.nbytes()));
      for (const auto& tensor : ins) sent.push_back(static_cast<int64_t>(tensor.nbytes()));
      at::Tensor to = flat(outs), from = flat(ins);
      exchange(to, from, received, sent);
      const auto parts = to.split_with_sizes(received);
      for (size_t r = 0; r < outs.size(); ++r) bytes_of(outs[r]).copy_(parts[r]);
      return {};
    };
    return call(options.asyncOp, std::move(start), kept);
  }

  // NCCL ignores tags: messages between two ranks keep their order.
  WorkPtr send(Tensors& tensors, int to, int) override {
    Start start = [this, tensor = operand(tensors[0]), to]() -> Finish {
      Tensors message{bytes_of(tensor)};
      auto work = inner_->send(message, to, 0);
      return [work, message] { work->wait(); };
    };
    return message(std::move(start), to, tensors);
  }

  WorkPtr recv(Tensors& tensors, int from, int) override {
    Start start = [this, tensor = operand(tensors[0]), from]() -> Finish {
      Tensors message{bytes_of(tensor)};
      auto work = inner_->recv(message, from, 0);
      return [work, message] { work->wait(); };
    };
    return message(std::move(start), from, tensors);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Start start = [this]() -> Finish {
      inner_->barrier()->wait();
      return {};
    };
    return launch(true, lane_, std::move(start), {}, /*on_host=*/true);
  }

 private:
  static Start all_of(std::vector<Start> starts) {
    if (starts.size() == 1) return std::move(starts[0]);
    return [starts = std::move(starts)]() -> Finish {
      std::vector<Finish> finishes;
      for (const auto& start : starts) finishes.push_back(start());
      return [finishes = std::move(finishes)] {
        for (const auto& finish : finishes)
          if (finish) finish();
      };
    };
  }

  WorkPtr call(bool async, Start start, const Tensors& kept) {
    async = async || ignores_async_op;
    if (!coalescing_) return launch(async, lane_, std::move(start), kept);
    together_.push_back(std::move(start));
    together_async_ = async;
    if (async) together_kept_.insert(together_kept_.end(), kept.begin(), kept.end());
    return c10::make_intrusive<StreamWork>(Event(), Tensors(), false);
  }

  WorkPtr message(Start start, int peer, const Tensors& kept) {
    if (coalescing_) return call(true, std::move(start), kept);
    std::unique_ptr<Lane>& lane = pairs_[peer];
    if (!lane) lane = std::make_unique<Lane>();
    return launch(true, *lane, std::move(start), kept);
  }

  WorkPtr launch(bool async, Lane& lane, Start start, Tensors kept, bool on_host = false) {
    connect();
    Stream& on = async ? lane.stream : this_stream();
    if (async) {
      Event before;
      before.record(this_stream());
      before.block(on);
    } else {
      kept.clear();
    }
    const uint64_t ticket = lane.issued++;
    on.push([&lane, ticket, start = std::move(start)] {
      {
        std::unique_lock<std::mutex> lock(lane.mutex);
        lane.changed.wait(lock, [&] { return lane.turn == ticket; });
      }
      std::exception_ptr error;
      try {
        at::AutoDispatchBelowADInplaceOrView guard;
        if (Finish finish = start()) finish();
      } catch (...) {
        error = std::current_exception();
      }
      {
        std::lock_guard<std::mutex> lock(lane.mutex);
        ++lane.turn;
        lane.changed.notify_all();
      }
      if (error) std::rethrow_exception(error);
    });
    if (!async && !returns_work) return nullptr;
    Event after;
    after.record(on);
    return c10::make_intrusive<StreamWork>(std::move(after), std::move(kept), on_host);
  }

  // ----- what runs on a stream; all tensors below are of the host

  void gather_bytes(at::Tensor to, at::Tensor from) {
    if (from.numel()) inner_->_allgather_base(to, from)->wait();
  }

  Tensors gathered(const at::Tensor& mine) {
    at::Tensor all = at::empty({getSize(), mine.numel()}, mine.options());
    gather_bytes(bytes_of(all), bytes_of(mine));
    return all.unbind(0);
  }

  void broadcast_bytes(const at::Tensor& tensor, int64_t root) {
    Tensors message{bytes_of(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    if (message[0].numel()) inner_->broadcast(message, options)->wait();
  }

  void exchange(
      at::Tensor& to, at::Tensor& from, std::vector<int64_t> received, std::vector<int64_t> sent) {
    inner_->alltoall_base(to, from, received, sent, c10d::AllToAllOptions())->wait();
  }

  static at::Tensor flat(const Tensors& tensors) {
    Tensors all;
    for (const auto& tensor : tensors) all.push_back(bytes_of(tensor));
    return at::cat(all);
  }

  void scatter_sums(
      const at::Tensor& out, at::Tensor from, const std::vector<int64_t>& sent,
      const ReduceOp& operation) {
    const auto bytes = static_cast<int64_t>(out.nbytes());
    at::Tensor to = at::empty({getSize() * bytes}, at::kByte);
    if (bytes == 0 && from.numel() == 0) return;
    exchange(to, from, std::vector<int64_t>(getSize(), bytes), sent);
    at::Tensor terms = at::empty({getSize(), out.numel()}, out.options());
    bytes_of(terms).copy_(to);
    reduce_into(out, terms.unbind(0), operation);
  }

  Start gather_to_each(Tensors outs, at::Tensor mine) {
    return [this, outs = std::move(outs), mine = std::move(mine)]() -> Finish {
      const Tensors all = gathered(mine);
      for (size_t r = 0; r < outs.size(); ++r) outs[r].copy_(all[r].view_as(outs[r]));
      return {};
    };
  }

  Start gather_into(at::Tensor out, at::Tensor in) {
    TORCH_CHECK(
        out.numel() == in.numel() * getSize(),
        "output tensor size must be equal to world_size times input tensor size");
    return [this, out, in]() -> Finish {
      at::Tensor mine = bytes_of(in);  // may be a part of the output
      if (in.numel()) mine = mine.clone();
      gather_bytes(bytes_of(out), mine);
      return {};
    };
  }

  Start sum(at::Tensor tensor, ReduceOp operation) {
    return [this, tensor, operation]() -> Finish {
      if (tensor.numel()) reduce_into(tensor, gathered(tensor.clone()), operation);
      return {};
    };
  }

  Start sum_scatter(at::Tensor out, at::Tensor in, ReduceOp operation) {
    TORCH_CHECK(
        in.numel() == out.numel() * getSize(),
        "input tensor must be the same size as output size times world size");
    TORCH_CHECK(in.dtype() == out.dtype(), "input and output must have one dtype");
    return [this, out, in, operation]() -> Finish {
      const std::vector<int64_t> sent(getSize(), static_cast<int64_t>(out.nbytes()));
      scatter_sums(out, bytes_of(in), sent, operation);
      return {};
    };
  }

  std::vector<int64_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
    const auto rows = tensor.dim() ? tensor.size(0) : 1;
    const auto row = rows ? static_cast<int64_t>(tensor.nbytes()) / rows : 0;
    std::vector<int64_t> bytes;
    for (int r = 0; r < getSize(); ++r)
      bytes.push_back(row * (sizes.empty() ? rows / getSize() : sizes[r]));
    return bytes;
  }

  c10::intrusive_ptr<Backend> inner_;
  c10::intrusive_ptr<GroupOptions> options_;
  std::atomic<bool> connected_{false};
  Lane& lane_ = *new Lane();  // leaked: its stream may still run
  std::map<int, std::unique_ptr<Lane>> pairs_;
  bool coalescing_ = false;
  bool together_async_ = true;
  std::vector<Start> together_;
  Tensors together_kept_;
};

}  // namespace

void bind_group(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<GroupOptions, Backend::Options, c10::intrusive_ptr<GroupOptions>>(m, "Options")
      .def(py::init([](double timeout_s) {
             return c10::make_intrusive<GroupOptions>(
                 std::chrono::milliseconds(static_cast<int64_t>(1000 * timeout_s)));
           }),
           py::arg("timeout_s") = 1800)
      .def_readwrite("high_priority", &GroupOptions::high_priority)
      .def("__deepcopy__", [](const GroupOptions& self, const py::dict&) {
        return c10::make_intrusive<GroupOptions>(self);
      });
  py::class_<Group, Backend, c10::intrusive_ptr<Group>>(m, "Group")
      .def(py::init<c10::intrusive_ptr<Backend>, c10::intrusive_ptr<GroupOptions>>())
      .def_property_readonly("connected", &Group::connected)
      .def("meet", &Group::meet)
      .def("perform_nocolor_split", [](Group& self, at::Device) { self.meet(); });
  m.def("set_make_inner", [](MakeInner function) { make_inner() = std::move(function); });
  m.def("num_communicators", [] { return num_communicators.load(); });
  m.def("set_ignores_async_op", [](bool value) { ignores_async_op = value; });
  m.def("set_returns_work", [](bool value) { returns_work = value; });
}

}  // namespace testdev
