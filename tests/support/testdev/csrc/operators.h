#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace testdev {

// How often each operator made the host wait because its outputs depend on values.
std::map<std::string, int64_t> synchronous_operators();

}  // namespace testdev
