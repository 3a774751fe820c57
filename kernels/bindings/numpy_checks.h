// Checks of numpy arguments: every error names the argument, what it was and what is allowed.
#pragma once

#include <pybind11/numpy.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/moe/expert_backend.h"

namespace moebius {

inline std::string shape_text(const std::vector<pybind11::ssize_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

inline void check_shape(const pybind11::array& array, const char* name, const std::vector<pybind11::ssize_t>& wanted) {
  const std::vector<pybind11::ssize_t> shape(array.shape(), array.shape() + array.ndim());
  if (shape == wanted) return;
  throw std::invalid_argument(std::string(name) + " has shape " + shape_text(shape) + "; it must be " +
                              shape_text(wanted));
}

inline std::string dtype_text(const pybind11::array& array) { return pybind11::str(array.dtype()).cast<std::string>(); }

// The array itself when it is T and C-contiguous, a contiguous copy when only the strides differ.
template <class T>
pybind11::array_t<T, pybind11::array::c_style> contiguous(const pybind11::array& array, const char* name,
                                                          const char* wanted) {
  if (pybind11::isinstance<pybind11::array_t<T>>(array)) {
    return pybind11::array_t<T, pybind11::array::c_style>::ensure(array);
  }
  throw std::invalid_argument(std::string(name) + " has dtype " + dtype_text(array) + "; it must be " + wanted);
}

// float32, uint16 holding the bits of bfloat16, or float16; contiguous as above.
struct FloatArray {
  FloatArray(const pybind11::array& source, const char* name) {
    if (pybind11::isinstance<pybind11::array_t<float>>(source)) {
      dtype = DType::kFloat32;
      array = contiguous<float>(source, name, "float32");
    } else if (source.dtype().kind() == 'f' && source.itemsize() == 2) {
      dtype = DType::kFloat16;
      array = pybind11::array::ensure(source, pybind11::array::c_style);
    } else {
      dtype = DType::kBFloat16;
      array = contiguous<uint16_t>(source, name, "float32, float16 or uint16 (bfloat16 bits)");
    }
  }

  DType dtype;
  pybind11::array array;
};

}  // namespace moebius
