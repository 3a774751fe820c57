// Routed experts of the servers of a mailbox, driven by host code that computes a step's layers itself.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/mailbox/mailbox.h"
#include "kernels/moe/routed_experts.h"

namespace moebius::mailbox {

// What the layers since take_times() took, nanoseconds.
struct ExpertTimes {
  uint64_t layers = 0;
  uint64_t rows = 0;
  uint64_t waited = 0;             // inside finish()
  uint64_t handed_off = 0;         // of that, what no server computed in
  std::vector<uint64_t> computed;  // [servers]
};

class MailboxExperts final : public RoutedExperts {
 public:
  // The mailbox outlives this object.
  explicit MailboxExperts(Mailbox& mailbox) : mailbox_(mailbox), deadline_ms_(0) {
    times_.computed.resize(mailbox.segment().geometry().num_servers);
  }

  // Layers from now on use this slot, which is free, and wait for servers this long.
  void use(uint32_t slot, uint64_t deadline_ms) {
    slot_ = slot;
    deadline_ms_ = deadline_ms;
  }

  // Throw as Mailbox::submit and Mailbox::collect.
  void begin(const ExpertRequest& request) override;
  void finish(float* output) override;

  ExpertTimes take_times();

 private:
  Mailbox& mailbox_;
  uint32_t slot_ = 0;
  uint64_t deadline_ms_;
  uint64_t epoch_ = 0;
  uint32_t rows_ = 0;
  uint64_t begun_ = 0;  // clock_ns()
  ExpertTimes times_;
};

}  // namespace moebius::mailbox
