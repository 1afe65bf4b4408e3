// The mailbox of wire/sockets.py: a frame is the length of the sender's address, that address, and messages, each after
// its length. This one sends a frame for each message.

#pragma once

#include <zmq.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>

class Mailbox {
   public:
    Mailbox() : context_(zmq_ctx_new()), inbound_(zmq_socket(context_, ZMQ_PULL)) {
        const int unlimited = 0;
        zmq_setsockopt(inbound_, ZMQ_RCVHWM, &unlimited, sizeof unlimited);
        if (zmq_bind(inbound_, "tcp://127.0.0.1:*") != 0) throw std::runtime_error("cannot bind");
        char endpoint[256];
        size_t size = sizeof endpoint;
        zmq_getsockopt(inbound_, ZMQ_LAST_ENDPOINT, endpoint, &size);
        address_ = std::string(endpoint);
        head_ = char(address_.size()) + address_;
    }

    const std::string& address() const { return address_; }

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
                for (size_t at = begin; at < frame.size();) {
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
            zmq_connect(peer->second, to.c_str());
        }
        frame_.assign(head_);
        for (size_t i = 0; i < kLength; i++) frame_.push_back(char(payload.size() >> (8 * i)));
        frame_.append(payload);
        if (zmq_send(peer->second, frame_.data(), frame_.size(), ZMQ_DONTWAIT) < 0) throw std::runtime_error("cannot send");
    }

   private:
    static constexpr size_t kLength = 4;  // bytes, lowest first

    static size_t length_at(std::string_view frame, size_t at) {
        size_t length = 0;
        for (size_t i = 0; i < kLength; i++) length |= size_t(uint8_t(frame.at(at + i))) << (8 * i);
        return length;
    }

    void* context_;
    void* inbound_;
    std::string address_, head_, frame_;
    std::unordered_map<std::string, void*> peers_;
};
