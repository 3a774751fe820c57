// Every format that has a name (weight_format.h lists what they mean).
#pragma once

#include <string>
#include <vector>

namespace moebius {

std::vector<std::string> weight_format_names();

}  // namespace moebius
