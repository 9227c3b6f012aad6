// Every process's Coordinator: a thread that issues its collectives in the order that rank 0's Negotiator
// (negotiator.h) decides, whatever order its callers submit them in.
//
//   submit() ──► Ready ──► rank 0 ──► Execute ──► every member issues the bucket
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

#include "frontends/horovod/links.h"
#include "frontends/horovod/negotiator.h"
#include "frontends/horovod/plain_collectives.h"
#include "frontends/horovod/request.h"
#include "gradients/fused_sum.h"

namespace fusedcomm::horovod {

struct Event {  // for the timeline, in µs since the coordinator began
  std::string name, phase;
  int64_t begin_us, end_us;
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

  void start_events(bool mark_cycles);
  std::vector<Event> take_events();

 private:
  struct Set {
    std::shared_ptr<PlainCollectives> plain;     // null: no member
    std::map<std::string, RequestPtr> requests;  // by key, until they are done
    std::vector<RequestPtr> unreported;
    std::map<std::string, Id> ids;
    int num_under_way = 0;
  };
  struct SetChange {
    int set;
    std::vector<int> ranks;  // empty: removed
  };

  void run();
  // Makes messages of what has been submitted since the last call.
  void report();
  void send_outbox();
  void on_lost(int rank);
  void handle_message(int from, const std::string& message);
  void send(int rank, const std::string& message);
  int wait_ms() const;

  void execute(const Execute& execute);
  std::vector<IssuedBucket> buckets_of(const Execute& execute);
  // Call these with mutex_ held.
  void fail_all(const std::string& why);
  RequestPtr zero_request(int set, const Signature& signature) const;
  bool is_idle() const;

  void issue(IssuedBucket bucket);
  void issue_plain(const std::shared_ptr<IssuedBucket>& bucket, PlainCollectives& plain);
  void issue_in_wire(const std::shared_ptr<IssuedBucket>& bucket, PlainCollectives& plain);
  std::shared_ptr<FusedSum> wire_sums(int set, const std::string& wire);
  // The bucket has ended. made: its new tensors, in the order of its requests' inputs.
  void ended(const IssuedBucket& bucket, std::exception_ptr error, std::vector<at::Tensor> made);
  void finish(const IssuedBucket& bucket, const std::string& error, std::vector<at::Tensor> made);
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
  std::deque<std::string> outbox_;  // to rank 0
  bool keeps_events_ = false, marks_cycles_ = false;
  std::vector<Event> events_;

  // Used only by thread_, except wake(), and the question whether there is a negotiator.
  Links links_;
  std::unique_ptr<Negotiator> negotiator_;  // on rank 0
  std::deque<std::string> inbox_;           // rank 0's messages to itself
  std::map<std::pair<int, std::string>, std::shared_ptr<FusedSum>> wires_;
  bool has_ended_ = false;

  std::thread thread_;
};

}  // namespace fusedcomm::horovod
