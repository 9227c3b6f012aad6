#include "watch/rank_state.h"

#include <chrono>

namespace fusedcomm {
namespace {

// Bytes of a failure's text that an answer keeps, because a report gives it one line.
constexpr size_t kMaxFailure = 300;

double seconds_since(Board::Clock::time_point then) {
  return std::chrono::duration<double>(Board::Clock::now() - then).count();
}

}  // namespace

bool RankState::is_at_work() const { return at == Board::View::At::kStage && !is_on_wire(stage); }

bool RankState::waits_for_others() const {
  return at == Board::View::At::kStream || (at == Board::View::At::kStage && is_on_wire(stage));
}

RankState state_of(const Board::View& view, const std::optional<std::string>& failure) {
  RankState state;
  state.num_handed = view.num_handed;
  state.num_ended = view.num_ended;
  state.last_step = view.last_step;
  state.idle_s = seconds_since(view.last_ended);
  if (failure) state.failure = failure->substr(0, kMaxFailure);
  if (!view.label) return state;
  state.job = view.num_chunks == 0 ? RankState::Job::kCall : RankState::Job::kBucket;
  state.label = view.label->text;
  state.step = view.step;
  state.num_chunks = view.num_chunks;
  state.waits_s = seconds_since(view.handed);
  state.at = view.at;
  if (view.at == Board::View::At::kStage) {
    state.stage = view.stage;
    state.chunk = view.chunk;
    state.stage_s = seconds_since(view.stage_began);
  }
  return state;
}

}  // namespace fusedcomm
