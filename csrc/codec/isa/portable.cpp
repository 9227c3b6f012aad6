// Kernels in plain C++, for any machine.
#include "codec/isa/blocks_impl.h"

namespace fusedcomm {

const KernelTable* portable_kernels() {
  static constexpr KernelTable kTable = make_table<Scalar>("portable");
  return &kTable;
}

}  // namespace fusedcomm
