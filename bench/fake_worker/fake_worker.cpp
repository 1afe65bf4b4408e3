// A prefill or decode worker without a model for bench.router (bench/router_worker.py starts it). Compiled, because
// it shares the machine with the router.
//
//   fake_worker --role decode --directory tcp://127.0.0.1:40001 --prefill-ms 0 --step-ms 0
//
// It prints its mailbox address, then reads a MessagePack array from stdin: its id, an Announce for the directory, and
// what follows room and epoch in its KVTarget, each encoded. It ends by a signal. Messages: wire/messages/transfer.py.
//
// It sends one `Tokens` message per token, whatever else is due, so that the router takes each token by itself.
// `Inspect` is answered with how long prefill took since the last time: the median, in milliseconds, from a Prefill
// to token 0. No message is repeated: nothing is lost between processes of one machine.

#define MSGPACK_NO_BOOST
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <deque>
#include <map>
#include <msgpack.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "mailbox.h"

namespace {

constexpr double kAnnounceS = 1.0;
constexpr int kAtOnce = 64;                              // messages read before the next token
constexpr uint64_t kFirstToken = 1000, kTokens = 2000;  // its tokens, in turn: ordinary ones in every vocabulary
constexpr uint64_t kBytes = 1024;                        // of KV in its timelines

struct Options {
    bool prefills = false;
    std::string directory;
    KeyPair keys;
    double prefill_s = 0.0, step_s = 0.0;
};

// The part of each message that it reads; msgpack leaves out the rest.
struct Sampling {
    uint64_t max_new_tokens = 16;
    MSGPACK_DEFINE_MAP(max_new_tokens)
};
struct Request {
    uint64_t room = 0, epoch = 0;
    msgpack::type::raw_ref prompt;
    Sampling sampling;
    MSGPACK_DEFINE_MAP(room, epoch, prompt, sampling)
};
struct Message {
    std::string kind, prefill;
    uint64_t room = 0, epoch = 0, token = 0;
    Request request;
    MSGPACK_DEFINE_MAP(kind, prefill, room, epoch, token, request)
};

// What it writes inside of messages.
struct Run {
    uint64_t room, epoch, start;
    std::array<uint64_t, 1> tokens;
    MSGPACK_DEFINE_MAP(room, epoch, start, tokens)
};
struct LastRun {
    uint64_t room, epoch, start;
    std::array<uint64_t, 1> tokens;
    std::string finish;
    MSGPACK_DEFINE_MAP(room, epoch, start, tokens, finish)
};
using Stamps = std::vector<std::pair<std::string, uint64_t>>;

// Its address, the proof of it, id, Announce, end of KVTarget.
using Identity = std::tuple<std::string, std::string, std::string, std::string, std::string>;
using Key = std::pair<uint64_t, uint64_t>;  // room, epoch

struct Room {
    std::string router;
    uint64_t prompt_tokens, max_new_tokens;
    uint64_t upto = 0;     // next position to send
    std::string decode{};  // P: the sender of KVTarget
};

double seconds(clockid_t clock) {
    timespec time{};
    clock_gettime(clock, &time);
    return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

double now() { return seconds(CLOCK_MONOTONIC); }

class FakeWorker {
   public:
    FakeWorker(Mailbox& mailbox, const Options& options, const Identity& identity)
        : mailbox_(mailbox), options_(options) {
        std::string address, proof;
        std::tie(address, proof, id_, announce_, kv_target_) = identity;
        mailbox_.introduce(address, proof);
    }

    [[noreturn]] void run() {
        for (;;) {
            const double at = now();
            if (at >= announce_at_) {
                announce_at_ = at + kAnnounceS;
                mailbox_.send(options_.directory, announce_);
            }
            if (!running_.empty() && at >= step_at_) {
                step_at_ = at + options_.step_s;
                step();
            }
            for (; !prefilling_.empty() && prefilling_.front().due <= at; prefilling_.pop_front())
                prefilled(prefilling_.front().key, prefilling_.front().came);
            if (mailbox_.wait(pause_ms()))
                mailbox_.receive(kAtOnce, [&](auto sender, auto payload) { take(sender, payload); });
        }
    }

   private:
    struct Prefilling {
        double due, came;
        Key key;
    };

    long pause_ms() const {
        double due = announce_at_;
        if (!running_.empty()) due = std::min(due, step_at_);
        if (!prefilling_.empty()) due = std::min(due, prefilling_.front().due);
        return std::max(0L, long(std::ceil((due - now()) * 1e3)));
    }

    void take(const std::string& sender, std::string_view payload) {
        const msgpack::object_handle handle = msgpack::unpack(payload.data(), payload.size(), by_reference);
        const auto message = handle.get().as<Message>();
        const std::string& kind = message.kind;
        const Key key{message.room, message.epoch};
        if (kind == "prefill" || kind == "decode") {
            begin(sender, message);
        } else if (kind == "kv_target" || kind == "kv_done" || kind == "release") {
            peer_sent(sender, kind, key);
        } else if (kind == "abort") {
            send(sender, "receipt", key, "of", kind);
            rooms_.erase(key);
        } else if (kind == "inspect") {
            inspected(sender, message.token);
        }
    }

    void begin(const std::string& router, const Message& message) {
        const Request& request = message.request;
        const Key key{request.room, request.epoch};
        send(router, "receipt", key, "of", message.kind);
        rooms_.insert_or_assign(key, Room{router, request.prompt.size / sizeof(int32_t), request.sampling.max_new_tokens});
        if (options_.prefills) {
            const double came = now();
            if (options_.prefill_s > 0) prefilling_.push_back({came + options_.prefill_s, came, key});
            else prefilled(key, came);
        } else if (message.prefill.empty()) {
            running_.push_back(key);
        } else {
            send(router, "reserved", key);
            write_map(5 + 3, "kind", "kv_target", "room", key.first, "epoch", key.second);
            buffer_.write(kv_target_.data(), kv_target_.size());
            send_written(message.prefill);
        }
        if (auto early = early_.find(key); early != early_.end()) {
            const auto [sender, kind] = early->second;
            early_.erase(early);
            peer_sent(sender, kind, key);
        }
    }

    void prefilled(Key key, double came) {
        auto found = rooms_.find(key);
        if (found == rooms_.end()) return;  // aborted
        send_token(key, found->second);
        own_ms_.push_back((now() - came) * 1e3);
        if (!found->second.decode.empty()) ship(key, found->second);
    }

    // A message of the other worker; it may arrive before the router's.
    void peer_sent(const std::string& sender, const std::string& kind, Key key) {
        auto found = rooms_.find(key);
        if (found == rooms_.end()) {
            early_[key] = {sender, kind};
        } else if (kind == "kv_target") {
            found->second.decode = sender;
            if (found->second.upto > 0) ship(key, found->second);
        } else if (kind == "kv_done") {
            running_.push_back(key);  // D sends token 0, too
        } else {
            rooms_.erase(found);
        }
    }

    void ship(Key key, const Room& room) {
        if (room.max_new_tokens == 1) {
            send(room.decode, "release", key);
        } else {
            send(room.decode, "kv_done", key, "context_tokens", room.prompt_tokens, "first_token", kFirstToken,
                 "kv_bytes", kBytes);
        }
        end(key, room, {"prefill_waiting", "prefill_forward", "prefill_transfer_kv_cache"});
    }

    void step() {
        size_t kept = 0;
        for (const Key& key : running_) {
            auto found = rooms_.find(key);
            if (found == rooms_.end()) continue;  // aborted
            send_token(key, found->second);
            if (found->second.upto < found->second.max_new_tokens) running_[kept++] = key;
            else end(key, found->second, {"decode_bootstrap", "decode_waiting", "decode_transferred", "decode_loop"});
        }
        running_.resize(kept);
    }

    void send_token(Key key, Room& room) {
        const uint64_t position = room.upto++;
        const std::array<uint64_t, 1> tokens = {kFirstToken + position % kTokens};
        write_map(3, "kind", "tokens", "worker", id_, "runs");
        writer_.pack_array(1);
        if (room.upto == room.max_new_tokens) writer_.pack(LastRun{key.first, key.second, position, tokens, "length"});
        else writer_.pack(Run{key.first, key.second, position, tokens});
        send_written(room.router);
    }

    void end(Key key, const Room& room, std::initializer_list<const char*> stages) {
        Stamps stamps;
        for (const char* stage : stages) stamps.emplace_back(stage, uint64_t(seconds(CLOCK_REALTIME) * 1e9));
        send(room.router, "timeline", key, "worker", id_, "stamps", stamps, "kv_bytes", kBytes, "kv_backend", "shm");
        rooms_.erase(key);
    }

    void inspected(const std::string& to, uint64_t token) {
        std::string own_ms = "null";
        if (!own_ms_.empty()) {
            auto middle = own_ms_.begin() + long(own_ms_.size() / 2);
            std::nth_element(own_ms_.begin(), middle, own_ms_.end());
            own_ms = std::to_string(*middle);
        }
        own_ms_.clear();
        write_map(3, "kind", "inspected", "token", token, "body", "{\"own_ms\": " + own_ms + "}");
        send_written(to);
    }

    // A message about a room: `more` are further keys and values.
    template <typename... More>
    void send(const std::string& to, const char* kind, Key key, const More&... more) {
        write_map(3 + sizeof...(more) / 2, "kind", kind, "room", key.first, "epoch", key.second, more...);
        send_written(to);
    }

    // The head of a map, and keys and values in it.
    template <typename... Words>
    void write_map(uint32_t size, const Words&... words) {
        buffer_.clear();
        writer_.pack_map(size);
        (writer_.pack(words), ...);
    }

    void send_written(const std::string& to) { mailbox_.send(to, {buffer_.data(), buffer_.size()}); }

    static bool by_reference(msgpack::type::object_type, std::size_t, void*) { return true; }  // nothing is copied

    Mailbox& mailbox_;
    const Options& options_;
    std::string id_, announce_, kv_target_;
    msgpack::sbuffer buffer_;
    msgpack::packer<msgpack::sbuffer> writer_{buffer_};
    std::map<Key, Room> rooms_;
    std::map<Key, std::pair<std::string, std::string>> early_;  // sender and kind
    std::vector<Key> running_;                                  // D: rooms that get a token each step
    std::deque<Prefilling> prefilling_;
    std::vector<double> own_ms_;
    double announce_at_ = 0.0, step_at_ = 0.0;
};

Identity read_identity() {
    msgpack::unpacker unpacker;
    msgpack::object_handle handle;
    while (!unpacker.next(handle)) {
        unpacker.reserve_buffer(4096);
        const ssize_t count = read(STDIN_FILENO, unpacker.buffer(), unpacker.buffer_capacity());
        if (count <= 0) throw std::runtime_error("stdin ended");
        unpacker.buffer_consumed(size_t(count));
    }
    return handle.get().as<Identity>();
}

}  // namespace

int main(int count, char** words) {
    Options options;
    for (int i = 1; i + 1 < count; i += 2) {
        const std::string name = words[i], value = words[i + 1];
        if (name == "--role") options.prefills = value == "prefill";
        else if (name == "--directory") options.directory = value;
        else if (name == "--prefill-ms") options.prefill_s = std::stod(value) / 1e3;
        else if (name == "--public-key") options.keys.open = value;
        else if (name == "--secret-key") options.keys.secret = value;
        else if (name == "--step-ms") options.step_s = std::stod(value) / 1e3;
        else return std::fprintf(stderr, "fake_worker: unknown option %s\n", name.c_str()), 2;
    }
    try {
        Mailbox mailbox(options.keys);
        std::printf("%s\n", mailbox.endpoint().c_str());
        std::fflush(stdout);
        FakeWorker(mailbox, options, read_identity()).run();
    } catch (const std::exception& error) {
        return std::fprintf(stderr, "fake_worker: %s\n", error.what()), 1;
    }
}
