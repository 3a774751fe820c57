#include <pybind11/stl.h>

#include "kernels/bindings/bindings.h"
#include "kernels/isa/isa.h"

namespace moebius {

void bind_moe(pybind11::module_& m) {
  m.def("isa_level", [] { return std::string(isa_name(resolve_isa("auto"))); });
  m.def("supported_isas", [] {
    std::vector<std::string> names;
    for (Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
    return names;
  });
}

}  // namespace moebius
