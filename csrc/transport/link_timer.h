// How long a link takes for what every rank sends to each of the others.
#pragma once

#include <cstdint>

#include "transport/exchange.h"

namespace fusedcomm {

// Seconds of an all-to-all of `nbytes` to each rank, of so many (two at least): the second-shortest, on the rank for
// which that is longest. The same on every rank. A collective call.
//
// Its tensors have no Python object: the backend's threads let go of them some time after the collective's end, and an
// interpreter that ends meanwhile would end such a thread, and with it the process, as soon as it asks for the GIL.
double all_to_all_s(const BackendPtr& backend, int64_t nbytes, int rounds);

}  // namespace fusedcomm
