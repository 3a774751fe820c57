// Python's lock (GIL) released while C++ computes, in a way that outlives the interpreter.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace moebius {

// As pybind11::gil_scoped_release, but for a thread whose call is still running when the interpreter shuts down. Python
// before 3.14 ends such a thread where it asks for the lock (pthread_exit): that unwinds through the destructor here,
// which may not throw, and std::terminate aborts a process that was about to exit with status 0. Such a thread
// waits instead for the process's end, as Python does itself since 3.14.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace moebius
