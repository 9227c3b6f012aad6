// The Python module: a table of contents, nothing else. The order matters, because a binding may name types that were
// bound before it.
#include "bindings/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  fusedcomm::bind_layout(m);
  fusedcomm::bind_codec(m);
  fusedcomm::bind_plan(m);
  fusedcomm::bind_devices(m);
  fusedcomm::bind_transport(m);
  fusedcomm::bind_gradients(m);
  fusedcomm::bind_ddp(m);
  fusedcomm::bind_reducer(m);
  fusedcomm::bind_rows(m);
  fusedcomm::bind_horovod(m);
}
