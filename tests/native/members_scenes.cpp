// Ranks that are lost within a pass, on the CUDA path without a GPU: the synchronizer, its engine, what is kept of a
// pass, CudaDevice and StreamTransport are the product's, on what cuda_rank.h simulates. A lost rank's collective
// ends for nobody, or for one rank alone, until the others abort it. Aborted collectives end with bytes of ones, and
// all that was enqueued behind them runs.
//
// pass() does what GradReducer::wait_for_members() does, and Control what the members' control threads do. Not shown:
// autograd, Python, the making of a communicator, and what NCCL does when it is aborted.
//
// Gradients are rough numbers, so that every rounding shows in the bits.
#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradients/collective_calls.h"
#include "gradients/synchronizer.h"
#include "require.h"
#include "scenes.h"
#include "sim_accelerator.h"
#include "sim_backend.h"
#include "sim_kernels.h"
#include "sim_training.h"
#include "transport/c10d_transport.h"

using namespace fusedcomm;

namespace {

constexpr std::chrono::seconds kIdle{20};
// Of several chunks, of two, small, and of two again.
const std::vector<std::vector<sim::Shape>> kBuckets = {
    {{5700}, {40, kExactWire}}, {{2500}}, {{700}}, {{64, kExactWire}, {3000}, {9}}};

using Bits = std::vector<uint32_t>;
using Results = std::map<int, std::map<size_t, Bits>>;  // by step and bucket

struct Setup {
  std::vector<int> members;  // their devices, in the order of ranks
  bool feedback = false;
  int num_steps = 4;
  sim::Loss loss;     // in the first view; its numbers are those of members
  int lost_in = -1;   // the step, 0 or 1
  uint32_t seed = 0;  // of the pauses
};

float gradient(int member, int step, size_t bucket, size_t i) {
  uint32_t bits = static_cast<uint32_t>(i * 2654435761U) ^ static_cast<uint32_t>(member * 40503 + step * 9176 + 77) ^
                  static_cast<uint32_t>(bucket << 20);
  for (int round = 0; round < 3; ++round) bits = (bits ^ bits >> 15) * 0x2C1B3C6DU;
  return static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31F;
}

// What the members say to each other, and the thread of each that stops its engine when a rank is lost.
class Control {
 public:
  explicit Control(const Setup& setup) : setup_(setup) {}

  void use(int member, std::shared_ptr<Synchronizer> synchronizer) {
    std::lock_guard<std::mutex> lock(mutex_);
    sessions_[member] = std::move(synchronizer);
    changed_.notify_all();
  }
  // Whether it counts that the member has finished the step in the view.
  bool finish(int member, int view, int step) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_changing_ && view == 0) return false;
    finished_[member] = step;
    changed_.notify_all();
    return true;
  }
  // Waits until all survivors have called it. Returns whether one of them has finished the step.
  bool recover(int member, int step, std::map<size_t, at::Tensor> means_of_last) {
    std::unique_lock<std::mutex> lock(mutex_);
    REQUIRE(is_changing_, "member %d recovers in step %d before a rank is lost", member, step);
    if (finished_.count(member) != 0) means_[finished_[member]] = std::move(means_of_last);
    ++num_there_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return num_there_ == setup_.members.size() - 1; });
    return std::any_of(finished_.begin(), finished_.end(), [&](const auto& of) { return of.second >= step; });
  }
  const at::Tensor& means(int step, size_t bucket) { return means_.at(step).at(bucket); }

  // The control threads, from when the rank is lost.
  void abort_all(sim::Group& group) {
    std::mt19937 random(setup_.seed);
    const sim::Loss& loss = setup_.loss;
    while (sim::num_ended(group) < loss.at + (loss.reached >= 0)) std::this_thread::yield();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] {
      const auto is_in_step = [&](int member) {
        return sessions_.count(member) != 0 && (setup_.lost_in == 0 || finished_.count(member) != 0);
      };
      return std::all_of(setup_.members.begin(), setup_.members.end(), is_in_step);
    });
    if (last_transfer_) {
      const int reached = setup_.members[static_cast<size_t>(loss.reached)];
      changed_.wait(lock, [&] { return finished_.count(reached) != 0 && finished_[reached] == setup_.lost_in; });
      num_ahead = 1;
    }
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
    lock.lock();
    is_changing_ = true;
    std::vector<std::shared_ptr<Synchronizer>> sessions;
    for (const auto& [member, session] : sessions_) sessions.push_back(session);
    lock.unlock();
    std::shuffle(sessions.begin(), sessions.end(), random);
    for (const auto& session : sessions) {
      session->abort("this scene has lost a rank");
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
    }
  }

  // Whether the collective in which the rank is lost is the last of its step, so that a rank that it reaches finishes.
  void expect_last(bool is_last) { last_transfer_ = is_last && setup_.loss.reached >= 0; }
  int num_ahead = 0;

 private:
  const Setup setup_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::shared_ptr<Synchronizer>> sessions_;
  bool is_changing_ = false, last_transfer_ = false;
  std::map<int, int> finished_;  // by member: the last step
  size_t num_there_ = 0;
  std::map<int, std::map<size_t, at::Tensor>> means_;  // by step and bucket
};

class Member {
 public:
  // Call it on the member's thread.
  Member(const Setup& setup, sim::Groups& groups, Control& control, int member)
      : setup_(setup),
        groups_(groups),
        control_(control),
        member_(member),
        on_device_(sim::device(member)),
        model_(sim::device(member), kBuckets),
        random_(setup.seed * 31 + static_cast<uint32_t>(member)) {
    session_ = make_session(setup.members);
    control.use(member, session_);
  }

  void train() {
    for (int step = 0; step < setup_.num_steps; ++step) {
      if (std::exchange(changes_before_pass_, false)) {
        const auto old = session_;
        change_view();
        session_->take_over(*old, /*again=*/false);
      }
      begin_pass(step);
      if (is_lost() && step == setup_.lost_in) return futures_.clear();
      end_pass(step);
    }
    sim::synchronize(sim::current_stream(member_), /*counts=*/false);
  }

  bool is_lost() const {
    return setup_.loss.rank >= 0 && setup_.members[static_cast<size_t>(setup_.loss.rank)] == member_;
  }
  const Results& results() const { return results_; }

 private:
  c10::Device device() const { return sim::device(member_); }
  std::vector<int> survivors() const {
    std::vector<int> left = setup_.members;
    left.erase(left.begin() + setup_.loss.rank);
    return left;
  }

  void change_view() {
    REQUIRE(view_++ == 0, "member %d: the view of the survivors has failed", member_);
    session_ = make_session(survivors());
  }

  std::shared_ptr<Synchronizer> make_session(const std::vector<int>& members) {
    const int rank = static_cast<int>(std::find(members.begin(), members.end(), member_) - members.begin());
    const int size = static_cast<int>(members.size());
    const auto cuda = sim::cuda_device(device());
    const auto transport = std::make_shared<StreamTransport>(
        sim::make_backend(groups_.get("view " + std::to_string(view_), size), rank, size, sim::BackendOptions()),
        device(), sim::nccl());
    WireConfig config;
    config.wire = Wire::kBf16;
    config.sum = Sum::kTwoShot;
    config.max_chunk_nbytes = 4096;
    config.num_slots = 2;
    config.keeps_messages = true;
    config.feedback = setup_.feedback;
    const auto engine = std::make_shared<Engine>(config, cuda, transport);
    for (int stream = 0; stream < 8; ++stream) sim::set_pause(member_, stream, random_() % 3 == 0 ? 400 : 40);
    return std::make_shared<Synchronizer>(engine, transport, model_.known, device(), /*wire_1d=*/0);
  }

  // Enqueues a backward pass.
  void begin_pass(int step) {
    gradients_.clear();
    futures_.clear();
    flags_ = gather(*session_, at::full({2}, step, at::kLong), "the flags of this scene");
    for (size_t b = 0; b < kBuckets.size(); ++b) {
      gradients_.emplace_back();
      size_t first = 0;
      for (const at::Tensor& parameter : model_.parameters[b]) {
        const auto element = [=, member = member_](size_t i) { return gradient(member, step, b, first + i); };
        gradients_.back().push_back(at::empty_like(parameter));
        sim::backward(gradients_.back().back(), element);
        first += static_cast<size_t>(parameter.numel());
      }
      if (random_() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 1500));
      futures_.push_back(session_->run(Bucket(b, b + 1 == kBuckets.size(), model_.parameters[b],
                                              std::make_shared<const Gradients>(gradients_.back()))));
    }
  }

  // Whether this member has all means of the pass.
  bool has_means(int step) {
    for (const FuturePtr& future : futures_) {
      if (future->hasError()) return false;
      future->waitAndThrow();
    }
    sim::count_queries(true);
    const bool counts = session_->wait_for_device();
    sim::count_queries(false);
    if (!counts) return false;
    REQUIRE(flags_->get().eq(step).all().item<bool>(), "member %d: the first message of step %d has other bytes",
            member_, step);
    return true;
  }

  void end_pass(int step) {
    while (!(has_means(step) && control_.finish(member_, view_, step))) {
      REQUIRE(setup_.loss.rank >= 0, "member %d: step %d failed, and nobody is lost", member_, step);
      // Others ask another thread for them, at any time.
      std::map<size_t, at::Tensor> means_of_last;
      std::thread server([&, is_there = results_.count(step - 1) != 0] {
        for (size_t b = 0; is_there && b < kBuckets.size(); ++b) means_of_last[b] = session_->kept().means(b).cpu();
      });
      server.join();
      sim::count_queries(true);
      session_->wait_until_idle(kIdle);
      sim::count_queries(false);
      if (control_.recover(member_, step, std::move(means_of_last))) {
        for (const size_t b : session_->kept().missing()) {
          session_->kept().complete(session_->engine(), b, control_.means(step, b));
        }
        changes_before_pass_ = true;
        break;
      }
      const auto old = session_;
      change_view();
      std::vector<Bucket> buckets = old->kept().packed(old->engine());
      session_->take_over(*old, /*again=*/true);
      flags_ = gather(*session_, at::full({2}, step, at::kLong), "the flags of this scene");
      for (const Bucket& bucket : buckets) futures_[bucket.index] = session_->run(bucket);
    }
    session_->kept().end();
    take_results(step);
  }

  // The optimizer.
  void take_results(int step) {
    if (is_lost()) return;  // it ends while the streams still work
    for (size_t b = 0; b < gradients_.size(); ++b) {
      Bits& bits = results_[step][b];
      for (const at::Tensor& tensor : gradients_[b]) {
        sim::optimizer(tensor, [&bits](size_t, double value) {
          bits.push_back(std::bit_cast<uint32_t>(static_cast<float>(value)));
        });
      }
    }
  }

  const Setup setup_;
  sim::Groups& groups_;
  Control& control_;
  const int member_;
  const c10::DeviceGuard on_device_;
  const sim::Model model_;
  std::mt19937 random_;
  int view_ = 0;
  std::shared_ptr<Synchronizer> session_;
  bool changes_before_pass_ = false;
  std::vector<std::vector<at::Tensor>> gradients_;  // of this pass, by bucket
  std::vector<FuturePtr> futures_;
  GatheredPtr flags_;
  Results results_;
};

struct Run {
  Results results;              // of every member that is left
  int64_t num_collectives = 0;  // of a step, if nobody is lost
};

Run train(const Setup& setup, bool loses_in_last_transfer = false) {
  sim::Groups groups;
  const auto group = groups.get("view 0", static_cast<int64_t>(setup.members.size()));
  sim::lose(*group, setup.loss);
  Control control(setup);
  control.expect_last(loses_in_last_transfer);
  std::mutex mutex;
  std::map<int, Results> of_members;
  std::thread aborting([&] {
    if (setup.loss.rank >= 0) control.abort_all(*group);
  });
  sim::on_threads(setup.members, [&](int index) {
    Member member(setup, groups, control, index);
    member.train();
    if (member.is_lost()) return;
    sim::finish(index);
    std::lock_guard<std::mutex> lock(mutex);
    of_members[index] = member.results();
  });
  aborting.join();
  REQUIRE(control.num_ahead == static_cast<int>(loses_in_last_transfer), "no survivor has finished the step");
  Run run{of_members.begin()->second, sim::num_ended(*group) / setup.num_steps};
  for (const auto& [member, results] : of_members) {
    REQUIRE(results == run.results, "members %d and %d have different means", of_members.begin()->first, member);
  }
  for (const int index : setup.members) control.use(index, nullptr);
  sim::reset();
  return run;
}

// Every collective of a step is once the one in which a rank is lost.
void lose_in_each(bool feedback, int lost_in, bool reaches_one) {
  Setup setup;
  setup.members = {0, 1, 2, 3};
  setup.feedback = feedback;
  const Run everybody = train(setup);
  const int64_t in_step = everybody.num_collectives;
  REQUIRE(in_step > 12, "only %ld collectives", static_cast<long>(in_step));
  std::map<int, Run> without;  // by lost rank
  for (int64_t at = 0; at < in_step; ++at) {
    const int lost = static_cast<int>(at % 4);
    setup.members = {0, 1, 2, 3};
    setup.members.erase(setup.members.begin() + lost);
    setup.loss = {};
    setup.lost_in = -1;
    if (without.count(lost) == 0) without[lost] = train(setup);
    setup.members = {0, 1, 2, 3};
    setup.lost_in = lost_in;
    setup.seed = static_cast<uint32_t>(at);
    setup.loss = {lost, lost_in * in_step + at, reaches_one ? (lost + 1) % 4 : -1};
    const bool is_finished = reaches_one && at + 1 == in_step;
    const Run run = train(setup, is_finished);
    for (int step = 0; step < setup.num_steps; ++step) {
      const bool by_all = step < lost_in + static_cast<int>(is_finished);
      const Results& wanted = by_all ? everybody.results : without[lost].results;
      REQUIRE(run.results.at(step) == wanted.at(step), "rank %d lost in collective %ld: step %d is not the mean of %s",
              lost, static_cast<long>(at), step, by_all ? "all" : "the survivors");
    }
  }
}

void lost() { lose_in_each(false, 1, false); }
void lost_with_feedback() { lose_in_each(true, 0, false); }
void reaching_one() { lose_in_each(false, 1, true); }

}  // namespace

const Scenes kMembersScenes = {
    {"lost", lost}, {"lost_with_feedback", lost_with_feedback}, {"reaching_one", reaching_one}};
