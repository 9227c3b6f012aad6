#include "frontends/horovod/current.h"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace fusedcomm::horovod {
namespace {

struct Current {
  std::mutex mutex;
  std::weak_ptr<Coordinator> coordinator;
  const pid_t process = getpid();
};

Current& current() {
  static std::atomic<Current*> only{new Current};  // never freed: hooks may still use it while the process ends
  // In a child of fork() the parent's mutex may be held by a thread that the child does not have.
  if (only.load()->process != getpid()) only = new Current;
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
                             " is ready, and this process has no job: hvd.init() was not called since "
                             "hvd.shutdown(), or was called before the process was forked");
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
