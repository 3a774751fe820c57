// Definition of the module. Compiled for the baseline only: it runs before any CPU check.
#include "kernels/bindings/bindings.h"

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "CPU expert kernels, machine topology and the shared-memory mailbox of Moebius.";
  moebius::bind_moe(m);
#ifdef MOEBIUS_WITH_TOPOLOGY
  moebius::bind_topology(m);
#endif
#ifdef MOEBIUS_WITH_MAILBOX
  moebius::bind_mailbox(m);
#endif
}
