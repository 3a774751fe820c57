#include "kernels/mailbox/mailbox_experts.h"

#include <algorithm>
#include <utility>

#include "kernels/mailbox/signal.h"

namespace moebius::mailbox {

void MailboxExperts::begin(const ExpertRequest& request) {
  begun_ = clock_ns();
  rows_ = request.rows;
  epoch_ = mailbox_.submit(slot_, request.layer, request.hidden_states, request.topk_ids, request.topk_weights,
                           request.rows);
}

void MailboxExperts::finish(float* output) {
  const uint64_t asked = clock_ns();
  const std::vector<uint64_t> spent = mailbox_.collect(slot_, epoch_, output, deadline_ms_);
  const uint64_t now = clock_ns();
  uint64_t longest = 0;
  for (size_t server = 0; server < spent.size(); ++server) {
    times_.computed[server] += spent[server];
    longest = std::max(longest, spent[server]);
  }
  // An answer that was there before it was asked for cost no more than its copy.
  const uint64_t since_begin = now - begun_;
  times_.handed_off += std::min(since_begin - std::min(since_begin, longest), now - asked);
  times_.waited += now - asked;
  times_.layers += 1;
  times_.rows += rows_;
}

ExpertTimes MailboxExperts::take_times() {
  ExpertTimes empty;
  empty.computed.resize(times_.computed.size());
  return std::exchange(times_, empty);
}

}  // namespace moebius::mailbox
