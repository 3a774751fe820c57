// moebius.kernels.source.SourceMatrix (or a plain ndarray) -> SourceMatrix, with every shape and dtype checked.
#pragma once

#include <pybind11/numpy.h>

#include <string>
#include <vector>

#include "kernels/format/source_matrix.h"

namespace moebius {

struct SourceArrays {
  SourceMatrix matrix;                  // points into the arrays below
  std::vector<pybind11::array> arrays;  // kept alive
};

// `name` begins every error. Throws std::invalid_argument saying what does not fit. Call with the GIL held.
SourceArrays read_source(const pybind11::object& source, const std::string& name);

}  // namespace moebius
