// The Python boundary: a table of contents, nothing else. What is bound later may name what is bound before.
#include "bindings/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  fusedcomm::bind_layout(m);
  fusedcomm::bind_codec(m);
  fusedcomm::bind_plan(m);
  fusedcomm::bind_devices(m);
  fusedcomm::bind_transport(m);
  fusedcomm::bind_gradients(m);
  fusedcomm::bind_ddp(m);
}
