// Definition of the module. Compiled for the baseline only: it runs before any CPU check.
#include "kernels/bindings/bindings.h"

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "CPU expert kernels, machine topology and the shared-memory mailbox of Moebius.";
  moebius::bind_moe(m);
  moebius::bind_format(m);
  moebius::bind_dense(m);
  moebius::bind_files(m);
  moebius::bind_placement(m);
  moebius::bind_topology(m);
  moebius::bind_mailbox_layout(m);
  moebius::bind_mailbox(m);
  moebius::bind_decoder(m);
}
