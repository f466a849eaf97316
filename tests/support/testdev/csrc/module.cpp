// What Python calls: `torch.testdev` is written on top of it.

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/Generator.h>

#include "backend.h"
#include "group.h"
#include "operators.h"

namespace py = pybind11;

PYBIND11_MODULE(testdev_native, m) {
  using namespace testdev;
  m.def("current_stream", &current_stream);
  m.def("exchange_current_stream", &exchange_current_stream);
  m.def("synchronize", &synchronize);
  // The current stream does nothing until what is returned is called.
  m.def("hold", [] { return hold(stream(current_stream())); });
  m.def("host_waits", &host_waits);
  m.def("synchronous_operators", &synchronous_operators);
  m.def("set_delays", &set_delays, py::arg("seed"), py::arg("probability"), py::arg("max_us"));
  m.def("empty_cache", &empty_cache);
  m.def("pinned_bytes", &pinned_bytes);
  m.def("reset_peaks", &reset_peaks);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("memory_stats", [] {
    const auto stats = memory_stats();
    return std::map<std::string, size_t>{
        {"allocated_bytes.all.current", stats.allocated},
        {"allocated_bytes.all.peak", stats.peak_allocated},
        {"reserved_bytes.all.current", stats.reserved},
        {"reserved_bytes.all.peak", stats.peak_reserved},
        {"allocation.all.allocated", stats.allocations},
        {"segment.all.current", stats.segments},
        {"num_alloc_retries", 0}};
  });
  m.def("default_generator", [] { return default_generator(); });
  bind_group(m);
}
