#include "kernels/mailbox/host_call.h"

#include <exception>

namespace moebius::mailbox {

void submit_on_host(void* argument) {
  HostCall& call = *static_cast<HostCall*>(argument);
  try {
    call.epoch = call.mailbox->submit(call.slot, call.layer, call.hidden_states, call.topk_ids, call.topk_weights,
                                      call.rows);
  } catch (const std::exception&) {
    ++call.failures;
  }
}

void collect_on_host(void* argument) {
  HostCall& call = *static_cast<HostCall*>(argument);
  try {
    call.mailbox->collect(call.slot, call.epoch, call.output, call.deadline_ms);
  } catch (const std::exception&) {
    ++call.failures;
  }
}

}  // namespace moebius::mailbox
