#include "frontends/reducer/problem.h"

#include <mutex>
#include <utility>

namespace fusedcomm {
namespace {

const std::string& problem_key() {
  static const std::string key = "problem";
  return key;
}

}  // namespace

void Problem::publish(const std::string& text) {
  courier().send(
      [text](c10d::Store& store) {
        if (!store.check({problem_key()})) store.set(problem_key(), text);
      },
      kStoreTimeout);
}

void Problem::note_pass(int rank, int64_t pass) {
  courier().send(
      [key = "pass/" + std::to_string(rank), text = std::to_string(pass)](c10d::Store& store) { store.set(key, text); },
      kStoreTimeout);
}

std::string Problem::read() {
  // An errand that is late goes on, so it has its own text.
  struct Found {
    std::mutex mutex;
    std::string text;
  };
  const auto found = std::make_shared<Found>();
  const auto unanswered = courier().send(
      [found](c10d::Store& store) {
        if (!store.check({problem_key()})) return;
        std::string text = store.get_to_str(problem_key());
        std::lock_guard<std::mutex> lock(found->mutex);
        found->text = std::move(text);
      },
      kStoreTimeout);
  std::lock_guard<std::mutex> lock(found->mutex);
  return unanswered ? "" : found->text;
}

Courier& Problem::courier() {
  if (!courier_) courier_ = std::make_unique<Courier>(store_);
  return *courier_;
}

}  // namespace fusedcomm
