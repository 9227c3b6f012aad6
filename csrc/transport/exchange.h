// Messages among the ranks of a channel, point to point, over a backend whose sends and receives only begin when they
// are called and end in wait(): gloo.
//
// Not gloo's all-to-all. A rank's message leaves when its receiver has said, on the same connection, that it waits for
// it. The all-to-all says so behind what it sends itself: of two ranks that do not begin together the first keeps its
// line idle until the other's whole message is there. Here receives are posted before sends.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "transport/peer_sentinels.h"
#include "transport/transport.h"

namespace fusedcomm {

class Exchange {
 public:
  // `max_sending`: of how many exchanges at once this rank sends its messages; 0: all. Their receives are posted when
  // they are started. Of connections that share a line TCP prefers now one and now the other, for seconds: with few
  // messages on each none gets far ahead, and the ranks end together.
  // `peer`: what another rank of the channel is called in errors, before its number on the channel.
  explicit Exchange(BackendPtr backend, int max_sending = 0, std::string peer = "rank ");
  // Ends what is under way with an error, and waits for its threads: not to be called on one of them.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int world_size() const { return backend_->getSize(); }

  // A part from every rank, in rank order, to `receive`; `send` has one part for each rank, or the one that all get,
  // which may lie where it is to be. All ranks start the same exchanges in the same order, and so they end; `done` is
  // called on a thread of this object, or on the caller's where there is no other rank.
  void start(const WireSpan& send, const WireSpan& receive, Lane::Completion done);

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Clock = std::chrono::steady_clock;
  struct Message {
    int peer;
    WireSpan bytes;
  };
  struct Pending {
    int peer;
    WorkPtr work;
    bool ended = false;
  };
  struct Item {
    std::vector<Message> sends, receives;
    WireSpan own_from, own_to;  // what this rank copies for itself, if anything
    Lane::Completion done;
    int tag = 0;
    Clock::time_point posted = {};
    std::vector<Pending> works = {};
    std::map<int, std::string> not_begun = {};  // errors, by peer
    std::exception_ptr error = nullptr;
  };

  static void copy_own(const Item& item);
  bool may_send() const;
  void post();
  void wait();
  template <typename Call>
  static void attempt(Item* item, const Call& call);
  std::string between(int peer) const;
  // What `call` throws has the peer in its text: a store that could tell who is missing may be gone with that rank.
  template <typename Call>
  auto between(int peer, const Call& call) const;
  // If the first item has not moved since the last look: looks for peers that are lost, and has it look again. Gloo
  // does not tell whoever waits for a message that its sender is lost while it is half read, and an item may be waited
  // for behind others.
  void look(std::unique_lock<std::mutex>* lock);
  std::exception_ptr lost(int peer);
  void wait_for(Item* item);
  // Its messages end, or it throws what prevents that of the one to or from `waiting_for`.
  void end_those_of_lost_peers(Item* item, int* waiting_for);
  // False: some have not, since a wait was aborted, to look again.
  bool end_all(Item* item, Clock::time_point timed_out, int* waiting_for);
  // After a wait for `failed` did not end well: what is known of all others whose messages are not complete. Those who
  // wait for a lost rank fail as well, and who waits for one of them first would name it alone.
  std::string others_awaited(Item* item, int failed, bool is_closed_here);
  // `call` begins the message, whose bytes it is given as tensors. What it throws is told when the item is waited for.
  template <typename Call>
  void begin(Item* item, const Message& message, const Call& call) const;
  void post_receives(Item* item);
  void post_sends(Item* item);

  const BackendPtr backend_;
  const size_t max_sending_;
  const std::string peer_;
  const std::chrono::milliseconds timeout_;
  // Of the posting thread alone.
  std::unique_ptr<PeerSentinels> sentinels_;
  int looked_at_ = 0;

  std::mutex mutex_;
  std::condition_variable to_post_, to_wait_;  // of the one thread each, so that neither wakes for the other
  int next_tag_ = 0;
  bool stopping_ = false;
  bool has_posted_all_ = false;
  std::vector<std::exception_ptr> lost_;  // by peer; none: it is there
  std::deque<Item> started_;
  std::deque<Item> unsent_;  // their receives are posted
  std::deque<Item> posted_;  // the first is being waited for

  // One begins, one waits: what is sent is copied into the socket by whoever begins it, and that must keep neither the
  // lane's thread nor those that wait.
  std::thread poster_, waiter_;
};

}  // namespace fusedcomm
