// Classify a picture over HTTP with POSIX sockets: ./infer PICTURE [HOST [PORT]]
// Build: g++ -std=c++17 -O2 -o infer infer.cpp
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>

static int connect_to(const std::string& host, const std::string& port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) throw std::runtime_error("unknown host " + host);
  int handle = -1;
  for (addrinfo* it = found; it != nullptr && handle < 0; it = it->ai_next) {
    handle = socket(it->ai_family, it->ai_socktype, it->ai_protocol);
    if (handle >= 0 && connect(handle, it->ai_addr, it->ai_addrlen) != 0) {
      close(handle);
      handle = -1;
    }
  }
  freeaddrinfo(found);
  if (handle < 0) throw std::runtime_error("cannot connect to " + host + ":" + port);
  return handle;
}

int main(int count, char** words) try {
  if (count < 2 || count > 4 || words[1][0] == '-') throw std::runtime_error("usage: infer PICTURE [HOST [PORT]]");
  std::ifstream file(words[1], std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + words[1]);
  const std::string picture{std::istreambuf_iterator<char>(file), {}};
  const std::string host = count > 2 ? words[2] : "127.0.0.1";
  const int handle = connect_to(host, count > 3 ? words[3] : "8000");
  const std::string request = "POST /v2/models/efficientnet_lite0/infer HTTP/1.1\r\nHost: " + host +
                              "\r\nContent-Type: image/jpeg\r\nConnection: close\r\nContent-Length: " +
                              std::to_string(picture.size()) + "\r\n\r\n" + picture;
  for (size_t sent = 0; sent < request.size();) {
    const ssize_t n = send(handle, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) throw std::runtime_error("the connection broke");
    sent += static_cast<size_t>(n);
  }
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = recv(handle, buffer, sizeof buffer, 0)) > 0;) answer.append(buffer, static_cast<size_t>(n));
  close(handle);
  const size_t head_end = answer.find("\r\n\r\n");
  if (head_end == std::string::npos) throw std::runtime_error("no complete answer");
  std::cout << answer.substr(head_end + 4) << "\n";  // JSON: outputs[0].data has "score:class:label" entries
  return answer.rfind("HTTP/1.1 200", 0) == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
