// Definition of the module. Compiled for the baseline only: it runs before any CPU check.
#include "kernels/bindings/bindings.h"

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "CPU expert kernels, machine topology and the shared-memory mailbox of Moebius.";
  moebius::bind_moe(m);
  moebius::bind_format(m);
  moebius::bind_requantise(m);
  moebius::bind_product(m);
  moebius::bind_topology(m);
  moebius::bind_pool(m);
  moebius::bind_mailbox(m);
  moebius::bind_probe(m);
}
