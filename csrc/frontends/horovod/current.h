// The coordinator that the process uses now, for native code that lives longer than one: hooks of an optimizer go on
// after another init().
#pragma once

#include <memory>

#include "frontends/horovod/coordinator.h"
#include "frontends/horovod/gradient_submitter.h"

namespace fusedcomm::horovod {

// Null: none.
void make_current(const std::shared_ptr<Coordinator>& coordinator);
// Submits to it and returns the handle; -1 if it has failed, which its caller learns from Coordinator::failure().
// Throws std::runtime_error if there is none.
int submit_to_current(Submission submission);

// The request of a submission.
RequestPtr request_of(Submission submission);

}  // namespace fusedcomm::horovod
