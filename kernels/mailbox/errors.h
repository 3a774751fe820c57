// What can go wrong in a mailbox, with the facts the Python exceptions carry.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace moebius::mailbox {

// The names are the Python exception classes of moebius/mailbox_errors.py.
enum class Failure {
  kMailbox,
  kAbiMismatch,
  kGeometryMismatch,
  kIdentityMismatch,
  kStaleEpoch,
  kServerLost,
  kCompute,
  kShutDown,
};

class MailboxError : public std::runtime_error {
 public:
  MailboxError(Failure failure, const std::string& message, int server_index = -1, int layer = -1)
      : std::runtime_error(message), failure(failure), server_index(server_index), layer(layer) {}

  const Failure failure;
  const int server_index;  // -1: no server is concerned
  const int layer;         // -1: no layer is concerned
};

}  // namespace moebius::mailbox
