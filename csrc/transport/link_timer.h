// Times a link by an all-to-all.
#pragma once

#include <cstdint>

#include "transport/exchange.h"

namespace fusedcomm {

// Returns the seconds that an all-to-all of `nbytes` bytes to each rank takes: each rank takes the second-shortest of
// `rounds` rounds (at least 2), and the result is the largest of these, the same on every rank. A collective call.
// Throws c10::Error if `rounds` is less than 2.
//
// The tensors must have no Python objects. The backend's threads release them some time after the collective's end. To
// release a Python object a thread asks for the GIL; if the interpreter ends at that time, this ends the thread and
// with it the process.
double all_to_all_s(const BackendPtr& backend, int64_t nbytes, int rounds);

}  // namespace fusedcomm
