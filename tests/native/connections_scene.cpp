// Calls connections() while the other end of a connection reads nothing, and again when it has read everything; for
// tests/watch/test_connections.py. First prints the number of bytes written to the connection. Then prints a line for
// each of the two moments: bytes unsent, bytes arrived, own addresses.
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "require.h"
#include "watch/connections.h"

using namespace fusedcomm;

namespace {

// Writes to `fd` until it accepts no more. Returns the number of bytes written.
int64_t fill(int fd) {
  const std::vector<char> bytes(1 << 16);
  int64_t given = 0;
  REQUIRE(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "on %d", fd);
  for (ssize_t written; (written = write(fd, bytes.data(), bytes.size())) > 0;) given += written;
  return given;
}

void print_connections() {
  const Connections found = connections();
  int64_t unsent = 0, arrived = 0;
  for (const auto& [end, nbytes] : found.unsent) unsent += nbytes;
  for (const auto& [end, nbytes] : found.arrived) arrived += nbytes;
  std::printf("%lld %lld", static_cast<long long>(unsent), static_cast<long long>(arrived));
  for (const std::string& address : found.own) std::printf(" %s", address.c_str());
  std::printf("\n");
}

}  // namespace

int main() {
  // connections() must ignore these: none of them is a TCP connection.
  int pipes[2], local[2];
  REQUIRE(pipe(pipes) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, local) == 0, "no pairs");
  fill(pipes[1]);
  fill(local[0]);

  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  REQUIRE(inet_pton(AF_INET6, "::ffff:127.0.0.1", &address.sin6_addr) == 1, "no address");
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  const int listener = socket(AF_INET6, SOCK_STREAM, 0);
  REQUIRE(bind(listener, any, size) == 0 && listen(listener, 1) == 0 && getsockname(listener, any, &size) == 0, "on %d",
          listener);
  const int sender = socket(AF_INET6, SOCK_STREAM, 0);
  REQUIRE(connect(sender, any, size) == 0, "on %d", sender);
  const int receiver = accept(listener, nullptr, nullptr);
  const int64_t given = fill(sender);
  std::printf("%lld\n", static_cast<long long>(given));
  print_connections();
  std::vector<char> bytes(1 << 16);
  for (int64_t got = 0; got < given;) {
    const ssize_t some = read(receiver, bytes.data(), bytes.size());
    REQUIRE(some > 0, "after %lld bytes", static_cast<long long>(got));
    got += some;
  }
  for (int look = 0; look < 1000 && !connections().unsent.empty(); ++look) poll(nullptr, 0, 10);
  print_connections();
  return 0;
}
