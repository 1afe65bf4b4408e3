// A prefill or decode worker without a model for bench.router (bench/router_worker.py starts it): it speaks the
// wire protocol (wire/messages.py) and does nothing else. Compiled, because it shares the machine with the router.
//
//   fake_worker --role decode --directory tcp://127.0.0.1:40001 --prefill-ms 0 --step-ms 0
//
// It prints its mailbox address, then reads from stdin, each with its length in four bytes, lowest first: its id,
// an Announce to send to the directory, and what follows room and epoch in its KVTarget. It ends by a signal.
//
// It sends ONE `Tokens` message per token, whatever else is due at the same moment, so that the router has to take
// each one by itself. `Inspect` is answered with how long prefill took it since the last time: from getting a
// Prefill to sending token 0, median, in milliseconds. Nothing is repeated: between processes of one machine
// nothing is lost, and a bench in which something were must fail rather than measure it.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "msgpack.h"
#include "zeromq.h"

namespace {

constexpr double kAnnounceS = 1.0;
constexpr int kAtOnce = 64;  // messages read before the next token
constexpr uint64_t kFirstToken = 1000, kTokens = 2000;  // ids it says, in turn: ordinary ones in every vocabulary
constexpr uint64_t kBytes = 1024;  // of KV that it says to have shipped

struct Given {
    bool prefills = false;
    std::string directory, id, announce, target;
    double prefill_s = 0.0, step_s = 0.0;
};

// What it needs of a message; the rest is skipped.
struct Message {
    std::string_view kind, prefill;
    uint64_t room = 0, epoch = 0, token = 0, prompt_tokens = 0, max_new_tokens = 16;
};

struct Room {
    uint64_t room, epoch, prompt_tokens, max_new_tokens;
    std::string router;
    uint64_t upto = 0;      // next position to send
    std::string target{};   // P: who sent KVTarget
};

double now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

uint64_t unix_ns() {
    timespec time{};
    clock_gettime(CLOCK_REALTIME, &time);
    return uint64_t(time.tv_sec) * 1'000'000'000 + uint64_t(time.tv_nsec);
}

void parse(msgpack::Reader& reader, Message& message) {
    for (size_t left = reader.map(); left > 0; left--) {
        const std::string_view key = reader.text();
        if (key == "kind") message.kind = reader.text();
        else if (key == "room") message.room = reader.integer();
        else if (key == "epoch") message.epoch = reader.integer();
        else if (key == "token") message.token = reader.integer();
        else if (key == "prompt") message.prompt_tokens = reader.text().size() / 4;
        else if (key == "max_new_tokens") message.max_new_tokens = reader.integer();
        else if (key == "request" || key == "sampling") parse(reader, message);
        else if (key == "prefill") message.prefill = reader.text();
        else reader.skip();
    }
}

class FakeWorker {
   public:
    FakeWorker(Mailbox& mailbox, const Given& given) : mailbox_(mailbox), given_(given) {}

    [[noreturn]] void run() {
        for (;;) {
            const double at = now();
            if (at >= announce_at_) {
                announce_at_ = at + kAnnounceS;
                mailbox_.send(given_.directory, given_.announce);
            }
            if (!running_.empty() && at >= step_at_) {
                step_at_ = at + given_.step_s;
                step();
            }
            for (; !prefilling_.empty() && prefilling_.front().due <= at; prefilling_.pop_front())
                prefilled(prefilling_.front().key, prefilling_.front().came);
            if (mailbox_.wait(pause_ms()))
                mailbox_.receive(kAtOnce, [&](auto sender, auto payload) { take(std::string(sender), payload); });
        }
    }

   private:
    using Key = std::pair<uint64_t, uint64_t>;  // room, epoch
    struct Prefilling {
        double due, came;
        Key key;
    };
    struct Early {
        std::string sender, kind;
    };

    long pause_ms() const {
        double due = announce_at_;
        if (!running_.empty()) due = std::min(due, step_at_);
        if (!prefilling_.empty()) due = std::min(due, prefilling_.front().due);
        return std::max(0L, long(std::ceil((due - now()) * 1e3)));
    }

    void take(const std::string& sender, std::string_view payload) {
        Message message;
        msgpack::Reader reader(payload);
        parse(reader, message);
        const Key key{message.room, message.epoch};
        if (message.kind == "prefill" || message.kind == "decode") {
            send(sender, about("receipt", key, 1).text("of").text(message.kind));
            begin(sender, key, message);
        } else if (message.kind == "kv_target" || message.kind == "kv_done" || message.kind == "release") {
            peer_said(sender, std::string(message.kind), key);
        } else if (message.kind == "abort") {
            send(sender, about("receipt", key, 1).text("of").text("abort"));
            rooms_.erase(key);
        } else if (message.kind == "inspect") {
            inspected(sender, message.token);
        }
    }

    void begin(const std::string& router, Key key, const Message& message) {
        const Room fresh{key.first, key.second, message.prompt_tokens, message.max_new_tokens, router};
        rooms_.insert_or_assign(key, fresh);
        if (given_.prefills) {
            const double came = now();
            if (given_.prefill_s > 0) prefilling_.push_back({came + given_.prefill_s, came, key});
            else prefilled(key, came);
        } else if (message.prefill.empty()) {
            running_.push_back(key);
        } else {
            send(router, about("reserved", key, 0));
            send(std::string(message.prefill), about("kv_target", key, 6).raw(given_.target));
        }
        if (auto early = early_.find(key); early != early_.end()) {
            const Early said = early->second;
            early_.erase(early);
            peer_said(said.sender, said.kind, key);
        }
    }

    void prefilled(Key key, double came) {
        auto found = rooms_.find(key);
        if (found == rooms_.end()) return;  // aborted
        say_token(found->second);
        own_ms_.push_back((now() - came) * 1e3);
        if (!found->second.target.empty()) ship(key, found->second);
    }

    // From a worker; it may be quicker than the router.
    void peer_said(const std::string& sender, const std::string& kind, Key key) {
        auto found = rooms_.find(key);
        if (found == rooms_.end()) {
            early_[key] = {sender, kind};
        } else if (kind == "kv_target") {
            found->second.target = sender;
            if (found->second.upto > 0) ship(key, found->second);
        } else if (kind == "kv_done") {
            running_.push_back(key);  // it says token 0 as well, like the real one
        } else {
            rooms_.erase(found);
        }
    }

    void ship(Key key, const Room& room) {
        if (room.max_new_tokens == 1) {
            send(room.target, about("release", key, 0));
        } else {
            auto done = about("kv_done", key, 3);
            done.text("context_tokens").integer(room.prompt_tokens).text("first_token").integer(kFirstToken);
            send(room.target, done.text("kv_bytes").integer(kBytes));
        }
        over(key, room, {"prefill_waiting", "prefill_forward", "prefill_transfer_kv_cache"});
    }

    void step() {
        size_t kept = 0;
        for (const Key& key : running_) {
            auto found = rooms_.find(key);
            if (found == rooms_.end()) continue;  // aborted
            say_token(found->second);
            if (found->second.upto < found->second.max_new_tokens) running_[kept++] = key;
            else over(key, found->second, {"decode_bootstrap", "decode_waiting", "decode_transferred", "decode_loop"});
        }
        running_.resize(kept);
    }

    void say_token(Room& room) {
        const uint64_t position = room.upto++;
        const bool last = room.upto == room.max_new_tokens;
        msgpack::Writer message;
        message.map(3).text("kind").text("tokens").text("worker").text(given_.id).text("runs").array(1);
        message.map(last ? 5 : 4).text("room").integer(room.room).text("epoch").integer(room.epoch);
        message.text("start").integer(position).text("tokens").array(1).integer(kFirstToken + position % kTokens);
        if (last) message.text("finish").text("length");
        send(room.router, message);
    }

    void over(Key key, const Room& room, std::initializer_list<const char*> stages) {
        auto timeline = about("timeline", key, 4);
        timeline.text("worker").text(given_.id).text("stamps").array(uint8_t(stages.size()));
        for (const char* stage : stages) timeline.array(2).text(stage).integer(unix_ns());
        send(room.router, timeline.text("kv_bytes").integer(kBytes).text("kv_backend").text("shm"));
        rooms_.erase(key);
    }

    void inspected(const std::string& to, uint64_t token) {
        char body[64] = "{\"own_ms\": null}";
        if (!own_ms_.empty()) {
            auto middle = own_ms_.begin() + long(own_ms_.size() / 2);
            std::nth_element(own_ms_.begin(), middle, own_ms_.end());
            std::snprintf(body, sizeof body, "{\"own_ms\": %.6f}", *middle);
        }
        own_ms_.clear();
        msgpack::Writer message;
        send(to, message.map(3).text("kind").text("inspected").text("token").integer(token).text("body").text(body));
    }

    // A message about a room, of which `more` fields follow.
    static msgpack::Writer about(std::string_view kind, Key key, uint8_t more) {
        msgpack::Writer message;
        message.map(uint8_t(3 + more)).text("kind").text(kind);
        message.text("room").integer(key.first).text("epoch").integer(key.second);
        return message;
    }

    void send(const std::string& to, const msgpack::Writer& message) { mailbox_.send(to, message.written()); }

    Mailbox& mailbox_;
    const Given& given_;
    std::map<Key, Room> rooms_;
    std::map<Key, Early> early_;
    std::vector<Key> running_;  // D: rooms that say a token each step
    std::deque<Prefilling> prefilling_;
    std::vector<double> own_ms_;
    double announce_at_ = 0.0, step_at_ = 0.0;
};

std::string read_blob() {
    unsigned char size[4];
    if (std::fread(size, 1, 4, stdin) != 4) throw std::runtime_error("stdin ended");
    std::string blob(size[0] | size[1] << 8 | size[2] << 16 | size[3] << 24, '\0');
    if (std::fread(blob.data(), 1, blob.size(), stdin) != blob.size()) throw std::runtime_error("stdin ended");
    return blob;
}

}  // namespace

int main(int count, char** words) {
    Given given;
    for (int i = 1; i + 1 < count; i += 2) {
        const std::string name = words[i], value = words[i + 1];
        if (name == "--role") given.prefills = value == "prefill";
        else if (name == "--directory") given.directory = value;
        else if (name == "--prefill-ms") given.prefill_s = std::stod(value) / 1e3;
        else if (name == "--step-ms") given.step_s = std::stod(value) / 1e3;
        else return std::fprintf(stderr, "fake_worker: unknown option %s\n", name.c_str()), 2;
    }
    try {
        Mailbox mailbox;
        std::printf("%s\n", mailbox.address().c_str());
        std::fflush(stdout);
        given.id = read_blob(), given.announce = read_blob(), given.target = read_blob();
        FakeWorker(mailbox, given).run();
    } catch (const std::exception& error) {
        return std::fprintf(stderr, "fake_worker: %s\n", error.what()), 1;
    }
}
