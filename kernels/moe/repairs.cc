#include "kernels/moe/repairs.h"

namespace moebius {

void Repairs::expect(bool expected) {
  const std::lock_guard lock(mutex_);
  expected_ = expected;
  ++changes_;
  changed_.notify_all();
}

bool Repairs::expected() const {
  const std::lock_guard lock(mutex_);
  return expected_;
}

void Repairs::found(Expert expert) {
  const std::lock_guard lock(mutex_);
  found_.push_back(expert);
  found_one_.notify_one();
}

std::optional<Repairs::Expert> Repairs::wait_for_found(std::chrono::nanoseconds longest) {
  std::unique_lock lock(mutex_);
  found_one_.wait_for(lock, longest, [&] { return !found_.empty() || interrupted_; });
  interrupted_ = false;
  if (found_.empty()) return std::nullopt;
  const Expert next = found_.front();
  found_.pop_front();
  return next;
}

void Repairs::interrupt() {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  found_one_.notify_all();
}

void Repairs::repaired(Expert expert) {
  const std::lock_guard lock(mutex_);
  given_up_.erase(expert);
  ++changes_;
  changed_.notify_all();
}

void Repairs::given_up(Expert expert, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  given_up_[expert] = reason;
  ++changes_;
  changed_.notify_all();
}

std::string Repairs::reason(Expert expert) const {
  const std::lock_guard lock(mutex_);
  const auto known = given_up_.find(expert);
  return known == given_up_.end() ? "" : known->second;
}

void Repairs::wait_for_change(std::chrono::nanoseconds longest) const {
  std::unique_lock lock(mutex_);
  const uint64_t before = changes_;
  changed_.wait_for(lock, longest, [&] { return changes_ != before; });
}

}  // namespace moebius
