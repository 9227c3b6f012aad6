#include "frontends/reducer/problem.h"

#include <exception>
#include <memory>

namespace fusedcomm {
namespace {

constexpr char kProblemKey[] = "problem";

}  // namespace

void Problem::publish(const std::string& text) {
  ask([text](c10d::Store& store) {
    if (!store.check({kProblemKey})) store.set(kProblemKey, text);
  });
}

void Problem::note_pass(int rank, int64_t pass) {
  ask([key = "pass/" + std::to_string(rank), text = std::to_string(pass)](c10d::Store& store) {
    store.set(key, text);
  });
}

std::string Problem::read() {
  const auto found = std::make_shared<std::string>();
  const bool has_succeeded = ask([found](c10d::Store& store) {
    if (store.check({kProblemKey})) *found = store.get_to_str(kProblemKey);
  });
  return has_succeeded ? *found : std::string();
}

bool Problem::ask(StoreClient::Request request) try {
  return client_.ask(std::move(request));
} catch (const std::exception&) {  // the store has failed
  return false;
}

}  // namespace fusedcomm
