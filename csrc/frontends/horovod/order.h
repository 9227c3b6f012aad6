// Every process's Order: issues its operations in the order that rank 0's Negotiator (negotiator.h) decides, whatever
// order its callers submit them in.
//
//   submit() ──► kReady ──► rank 0 ──► kExecute ──► every member issues the bucket
//
// Messages go over a gloo backend of their own. On rank 0 a thread for each other rank waits for that one's messages,
// on the others a thread waits for rank 0's. Who waits for its operation has sent it by itself; what nobody waits for
// yet is gathered for a moment, by one more thread. All sleep while nothing is under way.
#pragma once

#include <ATen/ATen.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "frontends/horovod/negotiator.h"

namespace fusedcomm::horovod {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Futures = std::vector<c10::intrusive_ptr<c10::ivalue::Future>>;

class Order {
 public:
  // An operation that this rank has submitted. Its entry's part is overwritten with a small sum.
  struct Request {
    int set = 0;
    Entry entry;
    int number = 0;  // once a join has ended: the rank that joined last

   private:
    friend class Order;
    bool is_told = false;    // rank 0 has been told of it
    bool has_moved = false;  // its data were under way
    bool is_done = false;
    std::string error;  // empty: it has ended; on an accelerator, its data move on a stream
  };
  using RequestPtr = std::shared_ptr<Request>;
  // Operations that are issued together on this rank. Requests are null where this rank has joined: it takes part
  // without having submitted the operation.
  struct Issue {
    int set = 0;
    std::vector<RequestPtr> requests;
    std::vector<Response> responses;  // to the requests, in their order
  };
  struct Options {
    int rank = 0, size = 1;
    std::vector<std::vector<int>> sets;  // the ranks of each process set
    NegotiatorOptions negotiator;
  };
  // Begins a bucket, and returns what is under way. One thread at a time calls it, in the same order on all members.
  // What it throws ends the operations of all ranks, as what other functions of the caller's throw.
  using Start = std::function<Futures(const Issue& issue)>;

  // control: null with one rank.
  Order(const Options& options, BackendPtr control, Start start, Negotiator::Mismatch mismatch, Negotiator::Say say);
  ~Order();

  // at_once: the caller is about to wait for it. A request that this rank has refused (its entry has a problem) may
  // come while its key is under way, and the key's next one is no error: rank 0 hears of a key's requests one after
  // another. Throws std::invalid_argument if another request of the key is under way, and std::runtime_error after a
  // failure.
  void submit(const RequestPtr& request, bool at_once);
  // Whether wait() would return at once.
  bool poll(const RequestPtr& request);
  // Waits for the operation's end. Returns its error; empty: it has none.
  std::string wait(const RequestPtr& request);
  // Ends the operations of every rank.
  void leave(const std::string& why);
  // Ends those of this rank alone: another may answer nobody, and a shutdown() from then on waits for no answer.
  void give_up(const std::string& why);
  // Idempotent. Returns whether all threads, and all that was under way, have ended.
  bool shutdown();
  std::string failure() const;
  // Whether this process is a child, by fork(), of the one that made it. Nothing else may be called then.
  bool is_in_fork() const { return getpid() != process_; }

 private:
  using Requests = std::vector<RequestPtr>;
  using Key = std::pair<int, std::string>;  // set and a key

  Requests take_due();
  void flush();
  void batch();
  void receive(int peer);
  // Does what a message asks for. Returns whether it is the peer's last one.
  bool handle(int peer, Message in);
  // Calls what may call the caller's functions.
  template <typename Function>
  void guard(const std::string& what, Function function);
  // Returns what is under way until the message has left; null if the peer is lost.
  c10::intrusive_ptr<c10d::Work> send(int peer, const Message& message);
  c10::intrusive_ptr<c10d::Work> send(int peer, MessageType type, std::string text);
  void emit();
  bool is_busy(int set);
  void ring();
  std::string failed_text(const std::string& key, const std::string& why) const;
  void issue(int set, Buckets buckets);
  // The operations of a bucket that concern this rank, with its requests.
  Issue issue_of(int set, std::vector<Response> bucket);
  // Finishes the requests when the last of these has ended. key: names them in an error.
  void follow(const Futures& futures, int set, const std::string& key, Requests requests);
  // With the mutex.
  void finish(const Requests& requests, const std::string& error);
  void end(const std::string& why);
  // Ends the operations of this rank.
  void fail(const std::string& why);

  const Options options_;
  const BackendPtr control_;
  const Start start_;
  const pid_t process_ = getpid();

  mutable std::mutex mutex_;  // guards the members below
  mutable std::condition_variable changed_;
  std::condition_variable bell_;             // for the batch thread
  std::multimap<Key, RequestPtr> requests_;  // until they are issued, those of a key in their order
  // Those of which rank 0 has not been told, in the order of submission: an operation waits for earlier ones of its
  // key, a join for all that was submitted before it.
  Requests queue_;
  std::string failure_;
  Clock::time_point failed_at_;
  bool is_rung_ = false, has_left_ = false;
  bool has_given_up_ = false, has_aborted_ = false;  // has_aborted_: no peer is heard any more
  int num_left_ = 0;                                 // threads, and buckets under way
  std::map<int, int> num_under_way_;                 // buckets by set
  bool rings_at_end_ = false;                        // of a bucket

  // On rank 0, held to decide what is next, and to issue it. Nobody who waits for it holds the GIL.
  std::recursive_mutex turn_;
  std::unique_ptr<Negotiator> negotiator_;
  bool is_watching_ = false;
  bool has_ended_all_ = false;

  std::recursive_mutex send_mutex_;
  std::deque<c10::intrusive_ptr<c10d::Work>> sent_;

  std::map<int, c10::intrusive_ptr<c10d::Work>> receiving_;  // by peer, with the mutex: what its thread waits for

  std::vector<std::thread> threads_;
};

}  // namespace fusedcomm::horovod
