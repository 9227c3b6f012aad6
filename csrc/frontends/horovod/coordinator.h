// Issues a process's collectives in the order that rank 0 decides (negotiator.h), whatever order its callers submit
// them in. One object for each process.
//
//   submit() ──► Ready ──► rank 0 ──► Execute ──► every member issues the bucket       (a thread of this object)
//   submit() completes a bucket of the plan ──► issued at once, without a message      (the steady state)
//
// A rank that cannot follow the plan asks rank 0 to stop it: its caller waits for something in a later bucket, or has
// submitted what the plan does not hold. Then every rank says how many buckets it has issued, and writes no result
// until rank 0 has told the least and the most of these numbers. Buckets that not every rank has issued are void: the
// ranks that had not issued them send zeros, nobody writes the results, and the requests are negotiated again. A result
// is never written before it is known to be valid, because a bucket cannot end before all ranks have entered it.
//
// Without requests under way the thread sleeps. With some, it wakes when a message comes, or when a stall is due.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "frontends/horovod/fused_sum.h"
#include "frontends/horovod/links.h"
#include "frontends/horovod/negotiator.h"
#include "frontends/horovod/plain_collectives.h"
#include "frontends/horovod/rank_plan.h"
#include "frontends/horovod/request.h"

namespace fusedcomm::horovod {

struct Event {  // for the timeline, in µs since the coordinator began
  std::string name, phase;
  int64_t begin_us, end_us;
};

struct CoordinatorStats {
  int64_t num_requests = 0, num_buckets = 0, num_planned_buckets = 0, num_voided = 0, num_plans = 0;
  int64_t num_control_messages = 0;
};

class Coordinator {
 public:
  struct Options {
    int rank = 0, size = 1;
    std::vector<int> sockets;
    NegotiatorOptions negotiator;
  };
  using Say = std::function<void(const std::string&)>;
  // Makes the sums of a set in a wire. Called on the coordinator's thread, in the same order on all members.
  using OpenWire = std::function<std::shared_ptr<FusedSum>(int set, const std::string& wire)>;

  Coordinator(const Options& options, Say say, OpenWire open_wire);
  ~Coordinator();

  // ranks: of the job, in the order of the set. backend: null if this rank is no member.
  void add_set(int set, std::vector<int> ranks, BackendPtr backend);
  void remove_set(int set);

  // Returns a handle. Throws std::invalid_argument if the name is pending, std::runtime_error after a failure.
  int submit(RequestPtr request);
  // Throw std::out_of_range if the handle is unknown.
  bool poll(int handle);
  Result wait(int handle);  // forgets the handle
  // Every rank's requests fail from then on. Idempotent.
  void shutdown();
  std::string failure() const;
  // Whether this process is a child, by fork(), of the one that made it. Nothing else may be called then.
  bool is_in_fork() const { return getpid() != process_; }
  int64_t num_pending() const;
  CoordinatorStats stats() const;

  void start_events(bool mark_cycles);
  std::vector<Event> take_events();

 private:
  struct Set {
    std::shared_ptr<PlainCollectives> plain;  // null: no member
    uint32_t epoch = 0;
    std::map<std::string, RequestPtr> requests;  // by key, until they are done
    std::vector<RequestPtr> unreported;
    std::map<std::string, Id> ids;
    std::shared_ptr<RankPlan> plan;
    int num_under_way = 0;
  };
  struct SetChange {
    int set;
    std::vector<int> ranks;  // empty: removed
  };
  struct Ended {  // a bucket that has ended while its plan stops
    IssuedBucket bucket;
    Write write;
  };

  void run();
  // Makes messages of what has been submitted since the last call.
  void report();
  void send_outbox();
  void on_lost(int rank);
  void handle_message(int from, const std::string& message);
  void handle_call(MessageType type, Reader& in);
  void send(int rank, const std::string& message);
  int wait_ms() const;

  void execute(const Execute& execute);
  void begin_plan(const Plan& plan);
  void stop_plan(const Stop& stop);
  void resume(const Resume& resume);
  // Call these with mutex_ held.
  void give_to_plan(Set& set, const RequestPtr& request);
  void deviate(int number, Set& set, std::vector<Id> missing);
  void queue_complete(int number, Set& set);
  void queue(IssuedBucket bucket);
  void fail_all(const std::string& why);
  RequestPtr zero_request(int set, const Signature& signature) const;
  // Asks to stop the plan if it keeps `request` from being issued.
  void look_at_plan(const Request& request, bool is_late);
  bool is_idle() const;

  // Issues what is queued, unless another thread does. May be called from any thread, without the mutex.
  // small: stops at a bucket that takes long to pack.
  void issue_queued(bool small);
  void issue(IssuedBucket bucket);
  void issue_plain(const std::shared_ptr<IssuedBucket>& bucket, PlainCollectives& plain);
  void issue_in_wire(const std::shared_ptr<IssuedBucket>& bucket, PlainCollectives& plain);
  std::shared_ptr<FusedSum> wire_sums(int set, const std::string& wire);
  bool waits_and_is_void(const std::shared_ptr<RankPlan>& plan, int64_t number);
  void ended(const IssuedBucket& bucket, std::exception_ptr error, Write write);
  void finish(const IssuedBucket& bucket, const std::string& error, std::vector<at::Tensor> made);
  void take_back(const IssuedBucket& bucket);
  void note(const Request& request);

  const Options options_;
  const Say say_;
  const OpenWire open_wire_;
  const Clock::time_point began_ = Clock::now();
  const pid_t process_ = getpid();

  mutable std::mutex mutex_;  // guards the members below; nobody who holds it waits for the GIL
  std::condition_variable changed_;
  std::map<int, Set> sets_;
  std::map<Id, Signature> signatures_;
  std::map<int, RequestPtr> handles_;
  int next_handle_ = 0;
  std::string failure_;
  Clock::time_point failed_at_;
  bool is_leaving_ = false;
  Clock::time_point leaving_since_;
  std::vector<SetChange> changes_;  // for the negotiator
  bool has_waited_ = false;         // whether a caller has got a result since the last submission
  std::deque<std::string> outbox_;  // to rank 0
  std::deque<IssuedBucket> queue_;
  bool is_issuing_ = false;
  std::vector<Ended> held_back_;
  std::vector<std::pair<int, std::vector<Id>>> done_;      // for the negotiator
  std::vector<std::pair<int, Clock::time_point>> cycles_;  // sets whose plan has ended once more, and when
  CoordinatorStats stats_;
  bool keeps_events_ = false, marks_cycles_ = false;
  std::vector<Event> events_;

  // Used only by the thread that issues; see is_issuing_.
  std::map<std::pair<int, std::string>, std::shared_ptr<FusedSum>> wires_;

  // Used only by thread_, except wake() and num_messages(), and the question whether there is a negotiator.
  Links links_;
  std::unique_ptr<Negotiator> negotiator_;  // on rank 0
  std::deque<std::string> inbox_;           // rank 0's messages to itself
  bool has_ended_ = false;

  std::thread thread_;
};

}  // namespace fusedcomm::horovod
