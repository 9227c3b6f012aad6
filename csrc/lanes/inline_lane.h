// A lane that has finished each piece of work before it returns: no overlap, no thread, no race. What forced
// synchronisation uses on CPU (FUSEDCOMM_SYNC); the results must be the same bits.
#pragma once

#include "lanes/cpu_lane.h"

namespace fusedcomm {

class InlineLane : public Lane {
 public:
  void wait(EventPtr) override {}  // every event of such lanes is complete when it is returned
  EventPtr run(EventPtr after, Task task) override;
  EventPtr start(EventPtr after, Transfer transfer) override;
  void finally(EventPtr after, Finally task) override;
  void stop(std::exception_ptr reason) override;

 private:
  std::exception_ptr error_before(const EventPtr& after) const;

  mutable std::mutex mutex_;
  std::exception_ptr stop_reason_;
};

}  // namespace fusedcomm
