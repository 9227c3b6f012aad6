// Point-to-point messages among the ranks of a channel, over a backend whose sends and receives begin when they are
// called and end in wait(): gloo.
//
// Why not gloo's all-to-all: a rank's message leaves only when its receiver has said, on the same connection, that it
// waits for it. The all-to-all says so after the data that it sends itself. If two ranks do not begin together, the
// first rank's line therefore stays idle until the other rank's whole message has arrived. Here receives are posted
// before sends.
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
  // `max_sending`: the number of exchanges that may send at the same time; 0: no limit. Receives are always posted at
  // the start. The limit serves connections that share a link: TCP prefers one of them for seconds, then another. With
  // few messages on each, none gets far ahead, and the ranks end together.
  // `peer`: what errors call another rank of the channel; its number on the channel follows.
  explicit Exchange(BackendPtr backend, int max_sending = 0, std::string peer = "rank ");
  // Ends exchanges under way with an error and joins the threads, so it must not run on one of them.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int world_size() const { return backend_->getSize(); }

  // Starts an exchange: `receive` gets one part from every rank, in rank order. `send` holds one part for each rank, or
  // a single part that goes to every rank; this one may lie at its place in `receive`. All ranks must start the same
  // exchanges in the same order, and they end in that order. `done` is called on a thread of this object, or on the
  // caller's thread if there is no other rank.
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
    WireSpan own_from, own_to;  // the part that this rank copies for itself; the same address if there is no copy
    Lane::Completion done;
    int tag = 0;
    Clock::time_point posted = {};
    std::vector<Pending> works = {};
    std::map<int, std::string> not_begun = {};  // by peer: the error of a message that could not begin
    std::exception_ptr error = nullptr;
  };

  static void copy_own(const Item& item);
  // Whether the first of unsent_ may post its sends.
  bool may_send() const;
  // The posting thread's loop.
  void post();
  // The waiting thread's loop.
  void wait();
  // Runs `call` unless the item has an error. Stores what `call` throws as the item's error.
  template <typename Call>
  static void attempt(Item* item, const Call& call);
  // The beginning of an error: "between this rank and rank 2: ".
  std::string between(int peer) const;
  // Runs `call`. Names the peer in the text of what it throws, because a store that could name a missing rank may be
  // gone with that rank.
  template <typename Call>
  auto between(int peer, const Call& call) const;
  // If the first item of posted_ was also the first at the last look: looks for lost peers, and aborts the item's waits
  // so that it takes them into account. Gloo does not report a lost sender to a wait for a half-read message. Besides,
  // the message of a lost peer may come late in the order of waiting.
  void look(std::unique_lock<std::mutex>* lock);
  // Returns why the peer is lost; null if it is not. Throws if the channel is being closed.
  std::exception_ptr lost(int peer);
  // Returns when all messages of the item have ended. Throws if one fails.
  void wait_for(Item* item);
  // The next two functions wait for messages of the item. They set `waiting_for` to the peer of each message they wait
  // for, and throw if that message fails.

  // Waits for messages to and from lost peers.
  void end_those_of_lost_peers(Item* item, int* waiting_for);
  // Waits for all messages. Returns false at the first one that has not ended, because look() has aborted its wait or
  // its peer is lost.
  bool end_all(Item* item, Clock::time_point deadline, int* waiting_for);
  // Called after the wait for peer `failed` has failed. Returns what is known about the other peers whose messages are
  // not complete, each after "; "; empty if nothing is known. Ranks that wait for a lost rank fail as well, so an error
  // with only the first failed peer could name one of those.
  std::string others_awaited(Item* item, int failed, bool is_closed_here);
  // Begins a message with `call`, which gets its bytes as tensors. An error is raised when the item is waited for.
  template <typename Call>
  void begin(Item* item, const Message& message, const Call& call) const;
  void post_receives(Item* item);
  void post_sends(Item* item);

  const BackendPtr backend_;
  const size_t max_sending_;
  const std::string peer_;
  const std::chrono::milliseconds timeout_;
  // Used only by the posting thread.
  std::unique_ptr<PeerSentinels> sentinels_;
  int looked_at_ = 0;  // the tag of the first item of posted_ at the last look

  std::mutex mutex_;
  std::condition_variable to_post_, to_wait_;  // one for each thread, so that no thread wakes for the other
  int next_tag_ = 0;
  bool stopping_ = false;
  bool has_posted_all_ = false;
  std::vector<std::exception_ptr> lost_;  // by peer; null: the peer is not lost
  std::deque<Item> started_;              // nothing is posted
  std::deque<Item> unsent_;               // receives are posted, sends are not
  std::deque<Item> posted_;               // all is posted; the first item is being waited for

  // One thread begins messages and one waits for them. The thread that begins a send copies its bytes into the socket.
  // This must not delay the lane's thread or the waits.
  std::thread poster_, waiter_;
};

}  // namespace fusedcomm
