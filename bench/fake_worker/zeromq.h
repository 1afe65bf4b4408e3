// The part of libzmq's stable C interface (zmq.h, 4.x) that the fake worker uses, and the mailbox on top of it
// (wire/sockets.py): a frame is the length of the sender's address, that address, messages after their length. This
// one sends a frame for each message.
//
// Declared here because pyzmq's wheels bring the library, but no header.

#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>

extern "C" {
struct zmq_msg_t {
    alignas(8) unsigned char opaque[64];
};
struct zmq_pollitem_t {
    void* socket;
    int fd;
    short events, revents;
};
void* zmq_ctx_new(void);
void* zmq_socket(void* context, int type);
int zmq_setsockopt(void* socket, int option, const void* value, size_t size);
int zmq_getsockopt(void* socket, int option, void* value, size_t* size);
int zmq_bind(void* socket, const char* address);
int zmq_connect(void* socket, const char* address);
int zmq_poll(zmq_pollitem_t* items, int count, long timeout_ms);
int zmq_send(void* socket, const void* data, size_t size, int flags);
int zmq_msg_init(zmq_msg_t* message);
int zmq_msg_recv(zmq_msg_t* message, void* socket, int flags);
int zmq_msg_close(zmq_msg_t* message);
void* zmq_msg_data(zmq_msg_t* message);
size_t zmq_msg_size(const zmq_msg_t* message);
}

class Mailbox {
   public:
    Mailbox() : context_(zmq_ctx_new()), inbound_(zmq_socket(context_, kPull)) {
        const int unlimited = 0;
        zmq_setsockopt(inbound_, kReceiveLimit, &unlimited, sizeof unlimited);
        if (zmq_bind(inbound_, "tcp://127.0.0.1:*") != 0) throw std::runtime_error("cannot bind");
        char endpoint[256];
        size_t size = sizeof endpoint;
        zmq_getsockopt(inbound_, kLastEndpoint, endpoint, &size);
        address_ = std::string(endpoint);
        head_ = char(address_.size()) + address_;
    }

    const std::string& address() const { return address_; }

    // Waits for mail, up to so many milliseconds.
    bool wait(long timeout_ms) {
        zmq_pollitem_t item{inbound_, 0, kPollIn, 0};
        return zmq_poll(&item, 1, timeout_ms) > 0;
    }

    // Gives take(sender, payload) the messages of at most `most` frames that are there.
    template <typename Take>
    void receive(int most, Take&& take) {
        for (; most > 0; most--) {
            zmq_msg_t message;
            zmq_msg_init(&message);
            const bool came = zmq_msg_recv(&message, inbound_, kNow) >= 0;
            if (came) {
                const std::string_view frame(static_cast<char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
                const size_t begin = frame.empty() ? 1 : size_t(uint8_t(frame[0])) + 1;
                for (size_t at = begin; at < frame.size();) {
                    const size_t length = length_at(frame, at);
                    take(frame.substr(1, begin - 1), frame.substr(at + 4, length));
                    at += 4 + length;
                }
            }
            zmq_msg_close(&message);
            if (!came) return;
        }
    }

    void send(const std::string& to, std::string_view payload) {
        auto [peer, fresh] = peers_.try_emplace(to, nullptr);
        if (fresh) {
            peer->second = zmq_socket(context_, kPush);
            const int many = 1 << 20;
            zmq_setsockopt(peer->second, kSendLimit, &many, sizeof many);
            zmq_connect(peer->second, to.c_str());
        }
        frame_.assign(head_);
        for (size_t shift = 0; shift < 32; shift += 8) frame_.push_back(char(payload.size() >> shift));
        frame_.append(payload);
        if (zmq_send(peer->second, frame_.data(), frame_.size(), kNow) < 0) throw std::runtime_error("cannot send");
    }

   private:
    static size_t length_at(std::string_view frame, size_t at) {
        size_t length = 0;
        for (size_t i = 0; i < 4; i++) length |= size_t(uint8_t(frame.at(at + i))) << (8 * i);
        return length;
    }

    static constexpr int kPull = 7, kPush = 8, kNow = 1;
    static constexpr int kSendLimit = 23, kReceiveLimit = 24, kLastEndpoint = 32;
    static constexpr short kPollIn = 1;

    void* context_;
    void* inbound_;
    std::string address_, head_, frame_;
    std::unordered_map<std::string, void*> peers_;
};
