// A lane that finishes each task before it returns: no overlap, no thread, no race. Forced synchronization
// (FUSEDCOMM_SYNC) uses it on CPU. The results must be the same bits as without.
#pragma once

#include "lanes/cpu_lane.h"

namespace fusedcomm {

class InlineLane : public Lane {
 public:
  void wait(EventPtr) override {}  // every event of such a lane is complete when it is returned
  EventPtr run(EventPtr after, Task task) override;
  EventPtr start(EventPtr after, Transfer transfer) override;
  void finally(EventPtr after, Finally task) override;
  void stop(std::exception_ptr reason) override;

 private:
  // Returns the error of `after`, or else the reason of stop(); null if there is neither.
  std::exception_ptr error_before(const EventPtr& after) const;

  mutable std::mutex mutex_;
  std::exception_ptr stop_reason_;
};

}  // namespace fusedcomm
