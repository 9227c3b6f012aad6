#include "frontends/horovod/links.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace fusedcomm::horovod {
namespace {

constexpr size_t kReadNbytes = 1 << 16;

}  // namespace

Links::Links(std::vector<int> sockets, std::vector<int> peers) : wake_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (sockets.size() != peers.size()) throw std::invalid_argument("fusedcomm: a socket is needed for each peer");
  if (wake_fd_ < 0) throw std::runtime_error(std::string("fusedcomm: eventfd failed: ") + std::strerror(errno));
  for (size_t i = 0; i < sockets.size(); ++i) {
    fcntl(sockets[i], F_SETFL, fcntl(sockets[i], F_GETFL) | O_NONBLOCK);
    links_.push_back({sockets[i], peers[i], false, false, {}, {}});
  }
}

Links::~Links() {
  for (const Link& link : links_) close(link.socket);
  close(wake_fd_);
}

void Links::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
}

void Links::wait(int timeout_ms, const std::function<void(int, std::string)>& on_message,
                 const std::function<void(int)>& on_lost) {
  std::vector<pollfd> fds = {{wake_fd_, POLLIN, 0}};
  for (const Link& link : links_) {
    const short wanted = link.outgoing.empty() ? POLLIN : POLLIN | POLLOUT;
    fds.push_back({link.is_lost ? -1 : link.socket, wanted, 0});
  }
  if (poll(fds.data(), fds.size(), timeout_ms) > 0) {
    if (fds[0].revents != 0) {
      uint64_t count;
      [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof count);
    }
    for (size_t i = 0; i < links_.size(); ++i) {
      if ((fds[i + 1].revents & POLLOUT) != 0) write_some(links_[i]);
      if ((fds[i + 1].revents & ~POLLOUT) != 0) read_some(links_[i]);
    }
  }
  for (size_t i = 0; i < links_.size(); ++i) {
    Link& link = links_[i];
    size_t at = 0;
    uint32_t nbytes;
    while (link.incoming.size() - at >= sizeof nbytes) {
      std::memcpy(&nbytes, link.incoming.data() + at, sizeof nbytes);
      if (link.incoming.size() - at - sizeof nbytes < nbytes) break;
      at += sizeof nbytes + nbytes;
      on_message(link.peer, link.incoming.substr(at - nbytes, nbytes));
    }
    link.incoming.erase(0, at);
    if (link.is_lost && !link.has_told) {
      link.has_told = true;
      on_lost(link.peer);
    }
  }
}

void Links::send(int peer, const std::string& message) {
  for (Link& link : links_) {
    if (link.peer != peer || link.is_lost) continue;
    const auto nbytes = static_cast<uint32_t>(message.size());
    link.outgoing.append(reinterpret_cast<const char*>(&nbytes), sizeof nbytes);
    link.outgoing += message;
    write_some(link);
  }
}

void Links::flush(int timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while (true) {
    std::vector<pollfd> fds;
    for (Link& link : links_) {
      if (!link.is_lost) write_some(link);
      if (!link.is_lost && !link.outgoing.empty()) fds.push_back({link.socket, POLLOUT, 0});
    }
    const auto left_ms = (deadline - std::chrono::steady_clock::now()) / std::chrono::milliseconds(1);
    if (fds.empty() || left_ms <= 0) return;
    poll(fds.data(), fds.size(), static_cast<int>(left_ms));
  }
}

void Links::hang_up(int timeout_ms) {
  flush(timeout_ms);
  for (const Link& link : links_) ::shutdown(link.socket, SHUT_WR);
}

void Links::close_after_peers(int timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  hang_up(timeout_ms);
  while (true) {
    std::vector<pollfd> fds;
    for (Link& link : links_) {
      if (!link.is_lost) read_some(link);
      link.incoming.clear();
      if (!link.is_lost) fds.push_back({link.socket, POLLIN, 0});
    }
    const auto left_ms = (deadline - std::chrono::steady_clock::now()) / std::chrono::milliseconds(1);
    if (fds.empty() || left_ms <= 0) return;
    poll(fds.data(), fds.size(), static_cast<int>(left_ms));
  }
}

void Links::write_some(Link& link) {
  size_t sent = 0;
  while (sent < link.outgoing.size()) {
    const ssize_t now = ::send(link.socket, link.outgoing.data() + sent, link.outgoing.size() - sent, MSG_NOSIGNAL);
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) {
      if (errno != EAGAIN && errno != EWOULDBLOCK) link.is_lost = true;
      break;
    }
    sent += static_cast<size_t>(now);
  }
  link.outgoing.erase(0, sent);
}

void Links::read_some(Link& link) {
  char buffer[kReadNbytes];
  while (true) {
    const ssize_t now = recv(link.socket, buffer, sizeof buffer, 0);
    if (now < 0 && errno == EINTR) continue;
    if (now < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (now <= 0) {
      link.is_lost = true;
      return;
    }
    link.incoming.append(buffer, static_cast<size_t>(now));
    if (static_cast<size_t>(now) < sizeof buffer) return;
  }
}

}  // namespace fusedcomm::horovod
