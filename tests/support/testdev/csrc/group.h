#pragma once

#include <pybind11/pybind11.h>

namespace testdev {

void bind_group(pybind11::module_& m);

}  // namespace testdev
