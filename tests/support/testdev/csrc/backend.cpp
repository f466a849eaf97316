// The device as torch sees it: allocator, guard (devices, streams, events), hooks, generator.

#include "backend.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace testdev {

Stream& this_stream() { return stream(current_stream()); }

// ----------------------------------------------------------------------------- allocators

void delete_block(void* block) { release(static_cast<Block*>(block)); }

namespace {

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDeviceType, 0);
    if (bytes == 0) return {nullptr, nullptr, &delete_block, device};
    Block* block = testdev::allocate(bytes, current_stream());
    TORCH_CHECK_WITH(
        OutOfMemoryError, block, "testdev out of memory. Tried to allocate ", bytes, " bytes");
    return {address(block), block, &delete_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    this_stream().push([to = shadow(to), from = shadow(from), bytes] {
      std::memmove(to, from, bytes);
    });
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = allocate_pinned(bytes);
    return {start, start, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kDeviceType, &device_allocator);

}  // namespace

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::empty_strided(
      sizes, strides, at::TensorOptions(dtype).device(c10::Device(kDeviceType, 0)));
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr fresh = device_allocator.allocate(bytes);
  const size_t common = std::min(bytes, storage.nbytes());
  if (common) device_allocator.copy_data(fresh.get(), storage.data(), common);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

at::Tensor shadow_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  TORCH_CHECK(tensor.device().type() == kDeviceType, "not on this device: ", tensor.device());
  const auto& storage = tensor.storage();
  const size_t bytes = storage.nbytes();
  TORCH_CHECK(
      tensor.numel() == 0 || storage.data() != nullptr,
      "testdev: an operator was called on a tensor whose storage has been freed");
  c10::Storage shadowed(
      c10::Storage::use_byte_size_t(), bytes,
      c10::DataPtr(shadow(storage.data()), c10::Device(c10::DeviceType::CPU)), nullptr, false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shadowed), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

// ------------------------------------------------------------------------------ generator

namespace {

struct GeneratorImpl final : at::CPUGeneratorImpl {
  explicit GeneratorImpl(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) {
    device_ = c10::Device(kDeviceType, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

}  // namespace

const at::Generator& default_generator() {
  static const auto* generator = new at::Generator(at::make_generator<GeneratorImpl>());
  return *generator;
}

// ---------------------------------------------------------------------------------- hooks

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<GeneratorImpl>();
  }
  at::Device getDeviceFromPtr(void*) const override { return {kDeviceType, 0}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

// ---------------------------------------------------------------------------------- guard

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDeviceType, 0}; }
  c10::Device getDevice() const override { return {kDeviceType, 0}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "invalid device ordinal ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_torch(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_torch(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_torch(stream_from_pool().id);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return as_torch(stream_from_pool().id);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return as_torch(exchange_current_stream(next.id()));
  }
  bool queryStream(const c10::Stream& one) const override { return stream(one.id()).idle(); }
  void synchronizeStream(const c10::Stream& one) const override {
    count_host_wait();
    Event here;
    here.record(stream(one.id()));
    here.wait();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize(); }

  static Event* event(void* handle) { return static_cast<Event*>(handle); }
  void destroyEvent(void* handle, const c10::DeviceIndex) const noexcept override {
    delete event(handle);
  }
  void record(void** handle, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (!*handle) *handle = new Event();
    event(*handle)->record(stream(on.id()));
  }
  void block(void* handle, const c10::Stream& on) const override {
    if (handle) event(handle)->block(stream(on.id()));
  }
  bool queryEvent(void* handle) const override { return !handle || event(handle)->done(); }
  void synchronizeEvent(void* handle) const override {
    if (handle) event(handle)->wait();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    if (data.get_context()) record_use(static_cast<Block*>(data.get_context()), on.id());
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return event(to)->time_ms() - event(from)->time_ms();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace testdev
