// What the parts of the backend share: tensors over shadow memory, and the current stream.

#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Stream.h>

#include "runtime.h"

namespace testdev {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

inline c10::Stream as_torch(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, 0), id);
}

// A CPU tensor over the same bytes, for work that a stream does. It keeps nothing alive: work that
// is still enqueued when its memory is freed reads what the memory holds then.
at::Tensor shadow_tensor(const at::Tensor& tensor);

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

void resize_storage(c10::StorageImpl& storage, size_t bytes);

void delete_block(void* block);  // the deleter of what the allocator gives out

// The generator of the device. Every operator that draws numbers takes one seed from it when it is
// called, so results do not depend on when streams run.
const at::Generator& default_generator();

Stream& this_stream();

}  // namespace testdev
