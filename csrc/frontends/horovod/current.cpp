#include "frontends/horovod/current.h"

#include <mutex>
#include <stdexcept>
#include <utility>

namespace fusedcomm::horovod {
namespace {

struct Current {
  std::mutex mutex;
  std::weak_ptr<Coordinator> coordinator;
};

Current& current() {
  static Current* const only = new Current;  // hooks may still use it while the process ends
  return *only;
}

}  // namespace

void make_current(const std::shared_ptr<Coordinator>& coordinator) {
  std::lock_guard<std::mutex> lock(current().mutex);
  current().coordinator = coordinator;
}

int submit_to_current(Submission submission) {
  std::unique_lock<std::mutex> lock(current().mutex);
  const std::shared_ptr<Coordinator> coordinator = current().coordinator.lock();
  lock.unlock();
  if (!coordinator) {
    throw std::runtime_error("fusedcomm: the gradient of " + submission.name +
                             " is ready, and hvd.init() has not been called since hvd.shutdown()");
  }
  try {
    return coordinator->submit(request_of(std::move(submission)));
  } catch (const std::runtime_error&) {
    if (coordinator->failure().empty()) throw;
    return -1;
  }
}

RequestPtr request_of(Submission submission) {
  auto request = std::make_shared<Request>();
  Signature& as = request->signature;
  as.kind = Kind::kAllreduce;
  as.name = submission.is_group ? "grouped." + submission.name : std::move(submission.name);
  as.op = static_cast<Op>(submission.op);
  as.prescale = submission.prescale;
  as.postscale = submission.postscale;
  as.wire = std::move(submission.wire);
  as.tensor_names = std::move(submission.names);
  describe(submission.tensors, &as);
  request->inputs = submission.tensors;
  request->outputs = std::move(submission.tensors);
  request->set = submission.set;
  return request;
}

}  // namespace fusedcomm::horovod
