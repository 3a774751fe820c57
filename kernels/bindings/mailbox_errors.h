// For bindings of functions that use a mailbox: its errors as Python's exceptions, and arrays by their addresses.
#pragma once

#include <pybind11/pybind11.h>

#include "kernels/mailbox/segment.h"

namespace moebius {

inline const char* class_name(mailbox::Failure failure) {
  switch (failure) {
    case mailbox::Failure::kAbiMismatch: return "AbiMismatch";
    case mailbox::Failure::kGeometryMismatch: return "GeometryMismatch";
    case mailbox::Failure::kIdentityMismatch: return "IdentityMismatch";
    case mailbox::Failure::kStaleEpoch: return "StaleEpoch";
    case mailbox::Failure::kServerLost: return "ServerLost";
    case mailbox::Failure::kCompute: return "ExpertComputeError";
    case mailbox::Failure::kShutDown: return "ShutDown";
    case mailbox::Failure::kMailbox: break;
  }
  return "MailboxError";
}

// The exception classes live in Python, where they are documented and typed.
inline void raise_python(const mailbox::MailboxError& error) {
  const pybind11::object type = pybind11::module_::import("moebius.mailbox").attr(class_name(error.failure));
  pybind11::object instance = type(error.what());
  instance.attr("server_index") = error.server_index;
  instance.attr("layer") = error.layer;
  PyErr_SetObject(type.ptr(), instance.ptr());
}

// Registers the exceptions for the calling module.
inline void register_mailbox_errors() {
  pybind11::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const mailbox::MailboxError& error) {
      raise_python(error);
    }
  });
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace moebius
