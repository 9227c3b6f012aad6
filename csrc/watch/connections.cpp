#include "watch/connections.h"

#if defined(__linux__)

#include <arpa/inet.h>
#include <dirent.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace fusedcomm {
namespace {

struct End {
  std::string address;  // numeric; empty if there is none
  int port = 0;
};

// Returns one end of the socket `fd`: the remote end if `get` is getpeername, the local end if it is getsockname. No
// end if `fd` is not an internet socket or has been closed.
End end_of(int fd, int (*get)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t nbytes = sizeof(address);
  if (get(fd, reinterpret_cast<sockaddr*>(&address), &nbytes) != 0) return {};
  int port = 0;
  char text[INET6_ADDRSTRLEN] = "";
  if (address.ss_family == AF_INET) {
    sockaddr_in v4{};
    std::memcpy(&v4, &address, sizeof(v4));
    port = ntohs(v4.sin_port);
    inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
  } else if (address.ss_family == AF_INET6) {
    sockaddr_in6 v6{};
    std::memcpy(&v6, &address, sizeof(v6));
    port = ntohs(v6.sin6_port);
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
  }
  constexpr char kMapped[] = "::ffff:";  // an IPv4 address on a socket for both IPv4 and IPv6
  const std::string found = text;
  return {found.rfind(kMapped, 0) == 0 ? found.substr(sizeof(kMapped) - 1) : found, port};
}

// Returns the bytes written to `fd` but not sent, or -1 if `fd` is not a TCP connection.
int64_t unsent_nbytes(int fd) {
  int type = 0, nbytes = 0;
  socklen_t size = sizeof(type);
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM) return -1;
  return ioctl(fd, SIOCOUTQNSD, &nbytes) == 0 ? nbytes : -1;
}

constexpr int kEstablished = 1;  // TCP_ESTABLISHED, which <netinet/tcp.h> names

// Bytes that were sent this many times again may be lost for good. A link that only drops some packets rarely drops the
// same one so often.
constexpr int kSentAgain = 3;

// Returns what the kernel says about the connection `fd`; zeros if it says nothing.
tcp_info info_of(int fd) {
  tcp_info info{};  // an older kernel fills in only the first fields
  socklen_t size = sizeof(info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 ? info : tcp_info{};
}

// Returns the seconds for which bytes have been sent again and again without an acknowledgement; 0 if there are none.
double unacked_s(const tcp_info& info) {
  if (info.tcpi_unacked == 0 || info.tcpi_retransmits < kSentAgain) return 0;
  // The timeout doubles with each transmission, so all before the last one took a little less than the next will.
  const double sending_s = info.tcpi_rto * 1e-6 * (1 - std::ldexp(1.0, -info.tcpi_backoff));
  // Nor is it longer than the last acknowledgement is ago. That alone says too much: the connection may have been idle.
  return std::min(sending_s + info.tcpi_last_data_sent * 1e-3, info.tcpi_last_ack_recv * 1e-3);
}

}  // namespace

Connections connections(int store_port) {
  Connections found;
  const std::unique_ptr<DIR, int (*)(DIR*)> fds(opendir("/proc/self/fd"), closedir);
  if (!fds) return found;
  while (const dirent* entry = readdir(fds.get())) {
    char* rest = nullptr;
    const int fd = static_cast<int>(std::strtol(entry->d_name, &rest, 10));
    if (*rest != '\0') continue;  // "." and ".."
    const int64_t nbytes = unsent_nbytes(fd);
    const auto [end, port] = nbytes < 0 ? End{} : end_of(fd, getpeername);
    if (end.empty()) continue;
    if (nbytes > 0) found.unsent[end] += nbytes;
    const tcp_info info = info_of(fd);
    found.arrived[end] += static_cast<int64_t>(info.tcpi_bytes_acked);
    if (const double seconds = unacked_s(info); seconds > 0) {
      found.unacked_s[end] = std::max(found.unacked_s[end], seconds);
    }
    if (info.tcpi_state == kEstablished) found.open_ends.insert(end + ":" + std::to_string(port));
    if (info.tcpi_state == kEstablished && port != store_port) {
      const double seconds = info.tcpi_last_data_recv * 1e-3;
      const auto heard = found.heard_s.emplace(end, seconds).first;
      heard->second = std::min(heard->second, seconds);
    }
    const auto [own, own_port] = end_of(fd, getsockname);
    found.own.insert(own);
    found.own_ends.insert(own + ":" + std::to_string(own_port));
  }
  return found;
}

}  // namespace fusedcomm

#else

namespace fusedcomm {
Connections connections(int) { return {}; }
}  // namespace fusedcomm

#endif
