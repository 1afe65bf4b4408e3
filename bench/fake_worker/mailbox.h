// The mailbox of wire/sockets.py: a frame is the length of the sender's address, that address, a mark (in a cluster with a
// secret the sender's proof, else the first bytes of the receiver's key), and messages, each after its length. This one
// sends a frame for each message, and checks no mark.

#pragma once

#include <zmq.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>

// A CURVE key pair in Z85; empty in a cluster without a secret.
struct KeyPair {
    std::string open, secret;
};

class Mailbox {
   public:
    explicit Mailbox(const KeyPair& keys) : context_(zmq_ctx_new()), inbound_(zmq_socket(context_, ZMQ_PULL)), keys_(keys) {
        if (!keys_.secret.empty()) {
            const int server = 1;
            zmq_setsockopt(inbound_, ZMQ_CURVE_SERVER, &server, sizeof server);
            present(inbound_);
        }
        const int unlimited = 0;
        zmq_setsockopt(inbound_, ZMQ_RCVHWM, &unlimited, sizeof unlimited);
        if (zmq_bind(inbound_, "tcp://127.0.0.1:*") != 0) throw std::runtime_error("cannot bind");
        char endpoint[256];
        size_t size = sizeof endpoint;
        zmq_getsockopt(inbound_, ZMQ_LAST_ENDPOINT, endpoint, &size);
        endpoint_ = std::string(endpoint);
    }

    const std::string& endpoint() const { return endpoint_; }

    // Who it says that it is, and what proves it ("" in a cluster without a secret). Call it before `send`.
    void introduce(const std::string& address, const std::string& proof) {
        head_ = char(address.size()) + address + proof;
    }

    // Waits for mail, up to so many milliseconds.
    bool wait(long timeout_ms) {
        zmq_pollitem_t item{inbound_, 0, ZMQ_POLLIN, 0};
        return zmq_poll(&item, 1, timeout_ms) > 0;
    }

    // Calls take(sender, payload) with the messages of at most `most` frames, without waiting.
    template <typename Take>
    void receive(int most, Take&& take) {
        for (; most > 0; most--) {
            zmq_msg_t message;
            zmq_msg_init(&message);
            const bool came = zmq_msg_recv(&message, inbound_, ZMQ_DONTWAIT) >= 0;
            if (came) {
                const std::string_view frame(static_cast<char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
                const size_t begin = frame.empty() ? 1 : size_t(uint8_t(frame[0])) + 1;
                for (size_t at = begin + kMark; at < frame.size();) {
                    const size_t length = length_at(frame, at);
                    take(std::string(frame.substr(1, begin - 1)), frame.substr(at + kLength, length));
                    at += kLength + length;
                }
            }
            zmq_msg_close(&message);
            if (!came) return;
        }
    }

    void send(const std::string& to, std::string_view payload) {
        auto [peer, fresh] = peers_.try_emplace(to, nullptr);
        if (fresh) {
            peer->second = zmq_socket(context_, ZMQ_PUSH);
            const int many = 1 << 20;
            zmq_setsockopt(peer->second, ZMQ_SNDHWM, &many, sizeof many);
            connect(peer->second, to);
        }
        frame_.assign(head_);
        if (keys_.secret.empty()) frame_.append(mark_of(to));
        for (size_t i = 0; i < kLength; i++) frame_.push_back(char(payload.size() >> (8 * i)));
        frame_.append(payload);
        if (zmq_send(peer->second, frame_.data(), frame_.size(), ZMQ_DONTWAIT) < 0) throw std::runtime_error("cannot send");
    }

   private:
    void present(void* socket) {
        zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, keys_.open.c_str(), keys_.open.size() + 1);
        zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, keys_.secret.c_str(), keys_.secret.size() + 1);
    }

    // To an address of wire/addresses.py: tcp://host:port/KEY, or tcp://host:port.
    void connect(void* socket, const std::string& to) {
        const std::string key = key_of(to);
        if (!keys_.secret.empty()) {
            char text[41];
            zmq_z85_encode(text, reinterpret_cast<const uint8_t*>(key.data()), key.size());
            present(socket);
            zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, text, sizeof text);
        }
        zmq_connect(socket, to.substr(0, to.find('/', kScheme)).c_str());
    }

    // The bytes of an address's key; none if it has no key.
    static std::string key_of(const std::string& address) {
        std::string key;
        const size_t slash = address.find('/', kScheme);
        if (slash == std::string::npos) return key;
        for (size_t at = slash + 1; at < address.size(); at += 2) key.push_back(char(std::stoi(address.substr(at, 2), nullptr, 16)));
        return key;
    }

    static std::string mark_of(const std::string& address) {
        std::string mark = key_of(address);
        mark.resize(kMark);
        return mark;
    }

    static constexpr size_t kLength = 4;   // bytes, lowest first
    static constexpr size_t kMark = 16;    // bytes
    static constexpr size_t kScheme = 6;   // of "tcp://"

    static size_t length_at(std::string_view frame, size_t at) {
        size_t length = 0;
        for (size_t i = 0; i < kLength; i++) length |= size_t(uint8_t(frame.at(at + i))) << (8 * i);
        return length;
    }

    void* context_;
    void* inbound_;
    KeyPair keys_;
    std::string endpoint_, head_, frame_;
    std::unordered_map<std::string, void*> peers_;
};
