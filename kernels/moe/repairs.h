// Experts whose packed bytes have changed: the thread that finds one reports it, the owner of the checkpoint repacks
// it, and calls that need it wait, so that nothing is computed with it meanwhile.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace moebius {

class Repairs {
 public:
  struct Expert {
    uint32_t layer;
    uint32_t expert;  // local index

    bool operator<(const Expert& other) const { return std::pair(layer, expert) < std::pair(other.layer, other.expert); }
  };

  // Sets whether a thread repairs reported experts; otherwise no call waits. Initially: no.
  void expect(bool expected);
  bool expected() const;

  // Reports a damaged expert, once for each damage.
  void found(Expert expert);
  // Returns the next reported expert, for the repairing thread; nothing within the time, or after interrupt().
  std::optional<Expert> wait_for_found(std::chrono::nanoseconds longest);
  // Ends the running wait for a reported expert, or the next one.
  void interrupt();

  // Report a repair's result; both wake waiting calls. An expert that was given up may be repaired later.
  void repaired(Expert expert);
  void given_up(Expert expert, const std::string& reason);
  // Returns why the expert was given up; empty: it was not.
  std::string reason(Expert expert) const;
  // Waits until a repair has ended, or the time is over.
  void wait_for_change(std::chrono::nanoseconds longest) const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::condition_variable found_one_;
  std::deque<Expert> found_;
  std::map<Expert, std::string> given_up_;
  uint64_t changes_ = 0;
  bool expected_ = false;
  bool interrupted_ = false;
};

}  // namespace moebius
