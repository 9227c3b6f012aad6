// The ranks' connections for messages about what to do next: rank 0 has one to every other rank, these have one to rank
// 0. Uses no torch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fusedcomm::horovod {

class Links {
 public:
  // A connection for each peer, in the order of `peers`; this object closes them.
  Links(std::vector<int> sockets, std::vector<int> peers);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // Interrupts wait(), from any thread.
  void wake();
  // Waits for messages, for room to send, for a wake(), or for `timeout_ms`; -1: without end. Calls on_message for each
  // message, and on_lost once for each peer whose connection has ended. Without anything to do it sleeps.
  void wait(int timeout_ms, const std::function<void(int peer, std::string message)>& on_message,
            const std::function<void(int peer)>& on_lost);
  // Queues a message. A lost peer gets none. Call it from the thread that calls wait().
  void send(int peer, const std::string& message);
  // Sends what is queued, for at most `timeout_ms`.
  void flush(int timeout_ms);
  // Sends what is queued, for at most `timeout_ms`, and nothing more.
  void hang_up(int timeout_ms);
  // Hangs up, and waits until every peer has closed its end, for at most `timeout_ms`. Otherwise the end of a
  // connection with unread messages would take from the peer what it has not read yet.
  void close_after_peers(int timeout_ms);

 private:
  struct Link {
    int socket, peer;
    bool is_lost = false, has_told = false;
    std::string incoming, outgoing;
  };
  void write_some(Link& link);
  void read_some(Link& link);

  std::vector<Link> links_;
  int wake_fd_;
};

}  // namespace fusedcomm::horovod
