// The order between the streams of a caller and those of the thread that issues or ends a collective.
//
// Ranks exchange tensors on an accelerator through the host, so the host waits for a result anyway: when a handle is
// done, its tensors can be read on any stream.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <memory>
#include <utility>
#include <vector>

#include "devices/stream_device.h"

namespace fusedcomm::horovod {

// An event behind all that the calling thread has enqueued for the tensors. Null if they are on the CPU.
inline std::shared_ptr<c10::Event> enqueued(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cpu()) continue;
    auto event = std::make_shared<c10::Event>(tensor.device().type());
    event->record(current_stream_of(tensor.device()));
    return event;
  }
  return nullptr;
}

// Makes all that this thread enqueues from now on for these tensors wait for the event, unless that is null.
inline void wait_for(const std::shared_ptr<c10::Event>& event, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (event && !tensor.is_cpu()) return event->block(current_stream_of(tensor.device()));
  }
}

}  // namespace fusedcomm::horovod
