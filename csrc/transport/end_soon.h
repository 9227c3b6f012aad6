// For the end of what may wait for a peer that is gone.
#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace fusedcomm {

// How long a destructor waits for collectives under way.
constexpr std::chrono::seconds kEndTimeout{10};

// Runs `end` on a thread and waits for it, for kEndTimeout at most. `end` may wait for a peer that is gone; then the
// thread goes on alone and keeps alive what it waits for. Returns false only then: true if `end` has ended or no thread
// could be started.
template <typename End>
bool end_soon(End end) {
  auto ended = std::make_shared<std::promise<void>>();
  const std::future<void> has_ended = ended->get_future();
  try {
    std::thread([end = std::move(end), ended]() mutable {
      end();
      ended->set_value();
    }).detach();
  } catch (const std::system_error&) {
    return true;
  }
  return has_ended.wait_for(kEndTimeout) != std::future_status::timeout;
}

}  // namespace fusedcomm
