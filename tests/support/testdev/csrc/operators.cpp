// Operators: every one is a CPU kernel that runs when the stream reaches it.
//
// At the call only shapes are worked out (by torch's own meta kernels) and outputs allocated. What
// the stream gets is the operator and the addresses of its tensors; it holds no reference to them,
// as a GPU's queue holds none.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "backend.h"
#include "operators.h"

namespace testdev {
namespace {

using c10::IValue;
using torch::jit::Stack;

std::mutex counts_mutex;
std::map<std::string, int64_t> synchronous;

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

void wait_for_this_stream() {
  Event here;
  here.record(this_stream());
  here.wait();
}

// ------------------------------------------------------------------- arguments, one by one

template <typename ForTensor>
IValue map_tensors(const IValue& value, const ForTensor& change) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    return tensor.defined() ? IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector())
      changed.push_back(
          tensor && tensor->defined() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

IValue with_device(const IValue& value, c10::DeviceType type) {
  return value.isDevice() ? IValue(c10::Device(type)) : value;
}

// Where a tensor of the host takes part: numbers, and indices, which a GPU would copy over.
at::Tensor host_operand(const c10::FunctionSchema& schema, const at::Tensor& tensor) {
  const bool index = schema.name().find("index") != std::string::npos;
  TORCH_CHECK(
      tensor.dim() == 0 || index, schema.name(),
      ": expected all tensors to be on the same device, but found ", tensor.device(), " and ",
      c10::Device(kDeviceType, 0));
  if (tensor.dim() > 0) count_host_wait();
  at::Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

at::Generator fresh_generator(const IValue& given) {
  at::Generator from = default_generator();
  if (given.isGenerator() && given.toGenerator().defined()) from = given.toGenerator();
  auto* generator = static_cast<at::CPUGeneratorImpl*>(from.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(from.mutex());
  return at::make_generator<at::CPUGeneratorImpl>(generator->random64());
}

bool is_generator(const c10::Argument& argument) {
  const auto text = argument.type()->str();
  return text == "Generator" || text == "Generator?";
}

Stack on_shadows(const c10::FunctionSchema& schema, at::ArrayRef<IValue> arguments) {
  Stack changed;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_generator(schema.arguments()[i])) {
      changed.emplace_back(fresh_generator(arguments[i]));
      continue;
    }
    auto operand = [&](const at::Tensor& tensor) {
      return on_device(tensor) ? shadow_tensor(tensor) : host_operand(schema, tensor);
    };
    changed.push_back(
        with_device(map_tensors(arguments[i], operand), c10::DeviceType::CPU));
  }
  return changed;
}

Stack on_meta(at::ArrayRef<IValue> arguments) {
  auto meta = [](const at::Tensor& tensor) {
    if (tensor.dim() == 0 && !on_device(tensor)) return tensor;  // a number
    auto options = tensor.options().device(c10::DeviceType::Meta).pinned_memory(false);
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  };
  Stack changed;
  for (const auto& value : arguments)
    changed.push_back(with_device(map_tensors(value, meta), c10::DeviceType::Meta));
  return changed;
}

// ------------------------------------------------------------------------ kinds of returns

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

// The argument that a return is, where the operator writes into its arguments; -1: a new tensor.
int written_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (!result.alias_info()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info && info->isWrite() && info->beforeSets() == result.alias_info()->beforeSets())
      return static_cast<int>(i);
  }
  TORCH_CHECK(false, "testdev: cannot tell what ", schema, " returns");
}

// A view needs no data: the operator of the CPU is asked about the untouchable addresses.
void make_view(const c10::OperatorHandle& op, Stack* stack, size_t num_arguments) {
  auto arguments = torch::jit::last(*stack, num_arguments);
  at::Tensor base;
  Stack changed;
  for (const auto& value : arguments) {
    changed.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
      if (!base.defined()) base = tensor;
      c10::Storage same(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
          c10::DataPtr(const_cast<void*>(tensor.storage().data()), c10::DeviceType::CPU), nullptr,
          false);
      auto alias = at::detail::make_tensor<c10::TensorImpl>(
          std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
      alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
      alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
      return alias;
    }));
  }
  op.callBoxed(changed);
  TORCH_CHECK(changed.size() == 1 && changed[0].isTensor(), "testdev: no such view: ", op.schema());
  const at::Tensor seen = changed[0].toTensor();
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), seen.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(seen.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides());
  torch::jit::drop(*stack, num_arguments);
  stack->emplace_back(std::move(result));
}

// -------------------------------------------------------------------------- the fallback

// Meta kernels give the statistics of norms the dtype that a GPU gives them: float32. Kernels of the
// CPU want their own back, that of the weight or of the input.
void narrow_statistics(const c10::OperatorHandle& op, Stack& arguments) {
  const auto& name = op.schema().name();
  const bool layer = name == "aten::native_layer_norm_backward";
  if (!layer && name != "aten::native_group_norm_backward") return;
  const at::Tensor input = arguments[1].toTensor();
  const IValue& weight = arguments[layer ? 5 : 4];
  const bool has_weight = weight.isTensor() && weight.toTensor().defined();
  const auto dtype = (has_weight ? weight.toTensor() : input).scalar_type();
  const size_t first = layer ? 3 : 2;
  for (size_t i = first; i < first + 2; ++i) arguments[i] = arguments[i].toTensor().to(dtype);
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& arguments) {
  at::AutoDispatchBelowADInplaceOrView guard;
  narrow_statistics(op, arguments);
  try {
    op.callBoxed(arguments);
  } catch (const c10::Error& error) {
    // It is raised where the host waits next, which may be far from the call.
    TORCH_CHECK(false, op.schema().operator_name(), " failed on the device: ", error.msg());
  }
}

at::Tensor like(const at::Tensor& meta) {
  return empty_on_device(meta.sizes(), meta.strides(), meta.scalar_type());
}

at::Tensor to_device_now(const at::Tensor& tensor) {
  at::Tensor result = like(tensor);
  wait_for_this_stream();  // for the filling of fresh memory
  shadow_tensor(result).copy_(tensor);
  return result;
}

// For operators whose outputs depend on values: the host waits, as it does with a GPU.
void run_synchronously(const c10::OperatorHandle& op, Stack* stack, size_t num_arguments) {
  {
    std::lock_guard<std::mutex> lock(counts_mutex);
    ++synchronous[op.schema().name()];
  }
  wait_for_this_stream();
  Stack inputs = on_shadows(op.schema(), torch::jit::last(*stack, num_arguments));
  run_on_cpu(op, inputs);
  torch::jit::drop(*stack, num_arguments);
  for (auto& value : inputs) stack->push_back(map_tensors(value, to_device_now));
}

void resize_outputs(
    const c10::FunctionSchema& schema, at::ArrayRef<IValue> arguments, const Stack& results) {
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    const int i = written_argument(schema, schema.returns()[r]);
    if (i < 0 || !results[r].isTensor()) continue;
    at::Tensor out = arguments[i].toTensor();
    if (out.sizes() != results[r].toTensor().sizes()) out.resize_(results[r].toTensor().sizes());
  }
}

bool has_empty_output(const c10::FunctionSchema& schema, at::ArrayRef<IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.is_out() && arguments[i].isTensor() && arguments[i].toTensor().numel() == 0)
      return true;
  }
  return false;
}

}  // namespace

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  if (is_view(schema)) return make_view(op, stack, num_arguments);

  const auto given = torch::jit::last(*stack, num_arguments);
  const Stack arguments(given.begin(), given.end());
  std::vector<int> written;
  bool makes_tensors = false;
  for (const auto& result : schema.returns()) {
    written.push_back(written_argument(schema, result));
    makes_tensors |= written.back() < 0;
  }

  Stack shapes;
  if (makes_tensors || has_empty_output(schema, arguments)) {
    shapes = on_meta(arguments);
    try {
      op.callBoxed(shapes);
    } catch (const std::exception&) {
      // No shapes without values; or an error, which the kernel of the CPU raises as well.
      return run_synchronously(op, stack, num_arguments);
    }
    for (const auto& value : shapes)
      if (!value.isTensor() && !value.isTensorList() && !value.isNone())
        return run_synchronously(op, stack, num_arguments);  // a number: `equal`
    resize_outputs(schema, arguments, shapes);
  }

  Stack results;
  std::vector<std::pair<size_t, at::Tensor>> outputs;  // number of the return, where it goes
  for (size_t r = 0; r < written.size(); ++r) {
    if (written[r] >= 0) {
      results.push_back(arguments[written[r]]);
      continue;
    }
    TORCH_CHECK(shapes[r].isTensor(), "testdev: lists of new tensors are not done: ", schema);
    if (!shapes[r].toTensor().defined()) {
      results.push_back(shapes[r]);
      continue;
    }
    at::Tensor made = like(shapes[r].toTensor());
    outputs.emplace_back(r, shadow_tensor(made));
    results.emplace_back(std::move(made));
  }
  this_stream().push(
      [op, inputs = on_shadows(schema, arguments), outputs = std::move(outputs)]() mutable {
        run_on_cpu(op, inputs);
        for (auto& [r, out] : outputs) {
          const at::Tensor made = inputs[r].toTensor();
          // Of statistics that nothing reads (batch norms in evaluation) the CPU makes none.
          if (made.numel() || !out.numel()) out.copy_(made);
        }
      });
  torch::jit::drop(*stack, num_arguments);
  for (auto& result : results) stack->push_back(std::move(result));
}

std::map<std::string, int64_t> synchronous_operators() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return synchronous;
}

namespace {

void fallback(const c10::OperatorHandle& op, Stack* stack) { run_operator(op, stack); }

// ---------------------------------------------------------------------- memory and copies

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* allocator = c10::GetAllocator(kDeviceType);
  return at::detail::empty_generic(
      sizes, allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto* allocator = c10::GetAllocator(kDeviceType);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

size_t bytes_needed(const at::Tensor& self) {
  return at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.dtype().itemsize(), self.storage_offset());
}

void grow_storage(const at::Tensor& self) {
  auto& storage = *self.storage().unsafeGetStorageImpl();
  const size_t bytes = bytes_needed(self);
  if (self.numel() && bytes > storage.nbytes()) resize_storage(storage, bytes);
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (impl->sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  grow_storage(self);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  impl->set_storage_offset(offset.expect_int());
  if (strides.data() && strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  grow_storage(self);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, c10::SymInt(elements), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kDeviceType), true);
  return set_storage(self, std::move(none), 0, c10::SymInt(0), {});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (on_device(self) && on_device(dst)) {
    this_stream().push([from = shadow_tensor(self), to = shadow_tensor(dst)]() mutable {
      at::AutoDispatchBelowADInplaceOrView guard;
      to.copy_(from);
    });
    return dst;
  }
  if (on_device(dst)) {  // from the host
    // A copy that does not block reads pinned memory when the stream is there, and pageable memory
    // at once: drivers stage it.
    const bool later = non_blocking && self.is_pinned();
    this_stream().push(
        [from = later ? self : self.clone(), to = shadow_tensor(dst)]() mutable {
          at::AutoDispatchBelowADInplaceOrView guard;
          to.copy_(from);
        });
    if (!non_blocking) wait_for_this_stream();
    return dst;
  }
  const bool later = non_blocking && dst.is_pinned();
  this_stream().push([from = shadow_tensor(self), to = dst]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  });
  if (!later) wait_for_this_stream();
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::Tensor to = dst;
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  wait_for_this_stream();
  return shadow_tensor(self).item();
}

void record_stream(at::Tensor& self, at::Stream on) {
  // As CUDA's allocator: what it did not give out, such as a part of a storage, it passes over.
  const auto& data = self.storage().data_ptr();
  if (data.get_context() && data.get_deleter() == &delete_block)
    record_use(static_cast<Block*>(data.get_context()), on.id());
}

// --------------------------------------------------------- operators under another name

const c10::OperatorHandle& named(const char* name) {
  static std::mutex mutex;
  static auto* found = new std::map<std::string, c10::OperatorHandle>();
  std::lock_guard<std::mutex> lock(mutex);
  auto it = found->find(name);
  if (it == found->end())
    it = found->emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first;
  return it->second;
}

void convolution(const c10::OperatorHandle&, Stack* stack) {
  run_operator(named("aten::convolution"), stack);
}

void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto given = torch::jit::last(*stack, count);
  Stack arguments(given.begin(), given.end());
  torch::jit::drop(*stack, count);
  const auto& mask = arguments.back().toBoolList();
  const bool bias = mask.get(2);
  const auto channels = arguments[0].toTensor().size(1);
  arguments.insert(
      arguments.begin() + 3,
      bias ? IValue(std::vector<int64_t>{channels}) : IValue());
  for (auto& argument : arguments) stack->push_back(argument);
  run_operator(named("aten::convolution_backward"), stack);
}

// The kernel of the CPU takes random numbers from the CPU's generator, when the stream gets there.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  const auto options = input.options().dtype(at::kBool);
  if (train && !*train) return {input.clone(), at::ones_like(input, options)};
  const at::Tensor mask = at::empty_like(input, options).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

// Recurrent cells that are fused on devices, and not on the CPU: made of operators that both have,
// which autograd goes through. What is returned for a backward of their own is not used.

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& state,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const auto in = (input_bias ? input + *input_bias : input).chunk(3, 1);
  const auto kept = (hidden_bias ? hidden + *hidden_bias : hidden).chunk(3, 1);
  const at::Tensor reset = (in[0] + kept[0]).sigmoid();
  const at::Tensor update = (in[1] + kept[1]).sigmoid();
  const at::Tensor fresh = (in[2] + reset * kept[2]).tanh();
  return {(state - fresh) * update + fresh, reset.detach()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor sum = input + hidden;
  if (input_bias) sum = sum + *input_bias;
  if (hidden_bias) sum = sum + *hidden_bias;
  const auto gates = sum.chunk(4, 1);
  const at::Tensor next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, sum.detach()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Copies see the bits of lazy conjugation and negation: resolving them is itself a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("view", TORCH_FN(view));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_", TORCH_FN(set_nothing));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("native_dropout", TORCH_FN(native_dropout));
  library.impl(
      "convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace testdev
