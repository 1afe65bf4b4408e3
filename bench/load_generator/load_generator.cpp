// Closed-loop load on one OpenAI-compatible server: N connections with keep-alive, each with one streamed
// request at a time, on one thread with epoll.
//
//   load_generator --host 127.0.0.1 --port 8000 --path /v1/completions --prompts FILE --first 0
//       --head '{"model":"m","prompt":' --tail ',"stream":true}'
//       --connections 64 --seconds 3 --warmup 0.5 --events 16
//
// FILE has one prompt a line, as JSON; request k sends head + line (first + k) + tail. Every answer is checked:
// status 200, a stream whose last event is [DONE], and exactly --events events before it (0: at least one).
// The last line of output is JSON: requests and rps in the measured time (a request counts where it ends),
// percentiles of the time to the first byte of the first event, and this process's own share of a core.
// Anything wrong with an answer is one line on stderr and exit code 1.

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sse_reader.h"

namespace {

struct Options {
    std::string host = "127.0.0.1", path = "/v1/completions", prompts, head, tail, key;  // key: of the API; "": none
    int port = 8000, connections = 1, events = 0;
    size_t first = 0;
    double seconds = 3.0, warmup = 0.0;
};

struct Connection {
    int socket = -1;
    std::string out;  // the request, as far as it has not been written
    size_t written = 0;
    double sent_at = 0.0;
    SseReader reader;
};

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "load_generator: %s\n", what.c_str());
    std::exit(1);
}

double now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

double cpu_seconds() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    auto seconds = [](const timeval& time) { return double(time.tv_sec) + double(time.tv_usec) * 1e-6; };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

Options parse(int count, char** words) {
    std::map<std::string, std::string> given;
    if (count % 2 == 0) fail("every option takes a value");
    for (int i = 1; i + 1 < count; i += 2) given[words[i]] = words[i + 1];
    Options options;
    auto text = [&](const char* name, std::string& value) {
        if (auto found = given.find(name); found != given.end()) value = found->second, given.erase(found);
    };
    std::string port = "8000", connections = "1", events = "0", first = "0", seconds = "3", warmup = "0";
    text("--host", options.host), text("--path", options.path), text("--prompts", options.prompts);
    text("--head", options.head), text("--tail", options.tail), text("--key", options.key);
    text("--port", port), text("--connections", connections), text("--events", events);
    text("--first", first), text("--seconds", seconds), text("--warmup", warmup);
    if (!given.empty()) fail("unknown option " + given.begin()->first);
    options.port = std::stoi(port), options.connections = std::stoi(connections);
    options.events = std::stoi(events), options.first = std::stoul(first);
    options.seconds = std::stod(seconds), options.warmup = std::stod(warmup);
    return options;
}

std::vector<std::string> read_lines(const std::string& path) {
    std::FILE* file = std::fopen(path.c_str(), "rb");
    if (file == nullptr) fail("cannot read " + path);
    std::vector<std::string> lines;
    char* line = nullptr;
    size_t room = 0;
    for (ssize_t length; (length = getline(&line, &room, file)) > 0;) {
        if (line[length - 1] == '\n') length--;
        lines.emplace_back(line, size_t(length));
    }
    std::free(line);
    std::fclose(file);
    if (lines.empty()) fail(path + " holds no prompts");
    return lines;
}

class Load {
   public:
    explicit Load(const Options& options)
        : options_(options), prompts_(read_lines(options.prompts)), connections_(size_t(options.connections)) {
        epoll_ = epoll_create1(0);
        for (auto& connection : connections_) open(connection);
    }

    void run() {
        const double begin = now();
        measure_from_ = begin + options_.warmup;
        measure_until_ = measure_from_ + options_.seconds;
        double cpu_before = cpu_seconds();
        bool measuring = false;
        for (auto& connection : connections_) send_next(connection);
        std::vector<epoll_event> events(connections_.size());
        while (in_flight_ > 0) {
            const int ready = epoll_wait(epoll_, events.data(), int(events.size()), 30'000);
            if (ready == 0) fail("no answer within 30 s");
            if (ready < 0 && errno != EINTR) fail("epoll_wait failed");
            if (!measuring && now() >= measure_from_) measuring = true, cpu_before = cpu_seconds();
            for (int i = 0; i < ready; i++) handle(*static_cast<Connection*>(events[size_t(i)].data.ptr), events[size_t(i)].events);
        }
        report((cpu_seconds() - cpu_before) / (now() - measure_from_));
    }

   private:
    void open(Connection& connection) {
        connection.socket = socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(uint16_t(options_.port));
        if (inet_pton(AF_INET, options_.host.c_str(), &address.sin_addr) != 1) fail("--host is no IPv4 address");
        if (connect(connection.socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
            fail("cannot connect to " + options_.host + ":" + std::to_string(options_.port));
        const int yes = 1;
        setsockopt(connection.socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.ptr = &connection;
        epoll_ctl(epoll_, EPOLL_CTL_ADD, connection.socket, &event);
    }

    void send_next(Connection& connection) {
        const std::string& prompt = prompts_[(options_.first + sent_++) % prompts_.size()];
        const size_t length = options_.head.size() + prompt.size() + options_.tail.size();
        connection.out = "POST " + options_.path + " HTTP/1.1\r\nHost: " + options_.host + ":" + std::to_string(options_.port) +
                         (options_.key.empty() ? "" : "\r\nAuthorization: Bearer " + options_.key) +
                         "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(length) + "\r\n\r\n" +
                         options_.head + prompt + options_.tail;
        connection.written = 0;
        connection.reader.reset();
        connection.sent_at = now();
        in_flight_++;
        flush(connection);
    }

    void flush(Connection& connection) {
        while (connection.written < connection.out.size()) {
            const ssize_t count = send(connection.socket, connection.out.data() + connection.written,
                                       connection.out.size() - connection.written, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (count < 0 && errno == EAGAIN) return watch(connection, EPOLLIN | EPOLLOUT);
            if (count < 0) fail("the server closed a connection on which a request was sent");
            connection.written += size_t(count);
        }
    }

    void watch(Connection& connection, uint32_t what) {
        epoll_event event{};
        event.events = what;
        event.data.ptr = &connection;
        epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.socket, &event);
    }

    void handle(Connection& connection, uint32_t what) {
        if (what & EPOLLOUT) {
            watch(connection, EPOLLIN);
            flush(connection);
        }
        if (!(what & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
        const ssize_t count = recv(connection.socket, buffer_, sizeof buffer_, MSG_DONTWAIT);
        if (count < 0 && errno == EAGAIN) return;
        if (count <= 0) fail("the server closed a connection before its answer was complete");
        SseReader& reader = connection.reader;
        const bool waiting = reader.events() == 0 && !reader.begun();
        if (const char* problem = reader.feed(std::string_view(buffer_, size_t(count))); problem != nullptr)
            fail(std::string(problem) + ": " + reader.excerpt());
        const double at = now();
        if (waiting && reader.begun() && connection.sent_at >= measure_from_ && at < measure_until_)
            first_byte_ms_.push_back((at - connection.sent_at) * 1e3);
        if (reader.done()) finish(connection, at);
    }

    void finish(Connection& connection, double at) {
        const SseReader& reader = connection.reader;
        if (!reader.said_done()) fail("an answer ended without [DONE]: " + reader.excerpt());
        if (options_.events ? reader.events() != options_.events : reader.events() == 0)
            fail("an answer had " + std::to_string(reader.events()) + " events, not " + std::to_string(options_.events));
        in_flight_--;
        if (reader.closes()) {  // as a proxy does that is being replaced
            close(connection.socket);
            open(connection);
        }
        if (at >= measure_from_ && at < measure_until_) completed_++;
        if (at < measure_until_) send_next(connection);
    }

    void report(double cpu_share) {
        std::sort(first_byte_ms_.begin(), first_byte_ms_.end());
        auto percentile = [&](double share) {
            return first_byte_ms_.empty() ? -1.0 : first_byte_ms_[size_t(share * double(first_byte_ms_.size() - 1))];
        };
        std::printf("{\"requests\": %ld, \"rps\": %.2f, \"first_ms_p50\": %.4f, \"first_ms_p99\": %.4f, \"cpu_share\": %.3f, \"sent\": %zu}\n",
                    completed_, double(completed_) / options_.seconds, percentile(0.5), percentile(0.99), cpu_share, sent_);
    }

    const Options options_;
    const std::vector<std::string> prompts_;
    std::vector<Connection> connections_;
    std::vector<double> first_byte_ms_;
    char buffer_[65536];
    double measure_from_ = 0.0, measure_until_ = 0.0;
    long completed_ = 0, in_flight_ = 0;
    size_t sent_ = 0;
    int epoll_ = -1;
};

}  // namespace

int main(int count, char** words) {
    Load load(parse(count, words));
    load.run();
}
