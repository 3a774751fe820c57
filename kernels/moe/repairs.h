// Experts whose packed bytes are not those that were packed: who finds one says so, whoever owns the checkpoint packs it
// anew, and whoever needs it waits, so that nothing is computed with it meanwhile.
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

  // Whether somebody repairs what is found; else nobody is waited for. At first: no.
  void expect(bool expected);
  bool expected() const;

  // A damaged expert, once for each damage.
  void found(Expert expert);
  // For whoever repairs: the next one that was found; nothing within the time, or after interrupt().
  std::optional<Expert> wait_for_found(std::chrono::nanoseconds longest);
  // Ends the wait for a found expert under way, or the next one.
  void interrupt();

  // How a repair went; both wake those who wait. An expert that was given up may be repaired later.
  void repaired(Expert expert);
  void given_up(Expert expert, const std::string& reason);
  // Why the expert was given up; empty: it was not.
  std::string reason(Expert expert) const;
  // Until a repair has ended, or the time is over.
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
