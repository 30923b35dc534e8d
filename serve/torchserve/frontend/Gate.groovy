import groovy.transform.CompileStatic
import io.netty.buffer.ByteBuf
import io.netty.buffer.Unpooled
import io.netty.channel.ChannelDuplexHandler
import io.netty.channel.ChannelFutureListener
import io.netty.channel.ChannelHandlerContext
import io.netty.channel.ChannelPromise
import io.netty.channel.socket.ChannelInputShutdownEvent
import io.netty.handler.codec.http.FullHttpResponse
import io.netty.handler.codec.http.HttpContent
import io.netty.handler.codec.http.HttpHeaderNames
import io.netty.handler.codec.http.HttpHeaderValues
import io.netty.handler.codec.http.HttpMethod
import io.netty.handler.codec.http.HttpRequest
import io.netty.handler.codec.http.HttpResponse
import io.netty.handler.codec.http.HttpUtil
import io.netty.handler.codec.http.LastHttpContent
import io.netty.util.ReferenceCountUtil
import java.nio.charset.StandardCharsets
import java.util.concurrent.TimeUnit
import java.util.regex.Pattern
import org.pytorch.serve.util.TokenAuthorization

/**
 * One connection's, between the HTTP codec and what gathers whole requests: it refuses what cannot be held before a byte
 * of it is, counts what was accepted until it is answered, and has `Answers` say what TorchServe 0.12 says in riddles.
 */
@CompileStatic
class Gate extends ChannelDuplexHandler {
    private static final String NO_TOKEN =
            'Token Authorization failed. Token either incorrect, expired, or not provided correctly'
    private static final String PING = '/ping'
    private static final Pattern LENGTH = Pattern.compile('[0-9]{1,18}')
    private static final long SETTLING_MS = 10

    private final Admission admission
    private final boolean inference
    private final RequestIds ids = new RequestIds()
    private int waiting = 0  // requests of this connection that are not answered
    private long bytes = 0  // of their bodies
    private long announced = 0  // bytes of the present body that were taken when its header came
    private boolean receiving = true  // the first request is awaited
    private long since = System.nanoTime()
    private boolean refusing = false
    private boolean closeWhenAnswered = false
    private HttpRequest request = null  // the present one, without its body
    private String path = ''
    private String contentType = ''
    private ModelQueue removed = null  // the one of the model that the present request removes
    private List<Object> held = null  // of that request, until all is answered that was asked of the model before

    Gate(Admission admission, boolean inference) {
        this.admission = admission
        this.inference = inference
    }

    @Override
    void handlerAdded(ChannelHandlerContext context) {
        lookAgain(context, admission.receiveMs)
    }

    @Override
    void channelRead(ChannelHandlerContext context, Object message) {
        if (held != null) {
            receiving = receiving && !(message instanceof LastHttpContent)
            if (message instanceof HttpRequest) {
                ids.come(context.channel(), (HttpRequest) message)
                ids.owe()
            }
            held.add(message)
            return
        }
        if (message instanceof HttpRequest && !accept(context, (HttpRequest) message)) {
            ReferenceCountUtil.release(message)
            return
        }
        if (message instanceof HttpContent) {
            boolean last = message instanceof LastHttpContent
            if (last) {
                receiving = false
            }
            if (refusing) {
                refusing = !last
                ReferenceCountUtil.release(message)
                return
            }
            if (!takeMore(context, ((HttpContent) message).content().readableBytes())) {
                ReferenceCountUtil.release(message)
                return
            }
        }
        if (removed != null && message instanceof HttpRequest) {
            held = [message]
            pass(context, System.nanoTime() + TimeUnit.SECONDS.toNanos(removed.patienceS))
            return
        }
        context.fireChannelRead(message)
    }

    /**
     * Let TorchServe remove a model when what was asked of it is answered: 0.12 ends a worker in the middle of a batch,
     * and forgets what waits for it. What comes meanwhile is told that the model has been removed, or goes to the default
     * version. Where nobody waits for the removal any more, it is given up.
     */
    private void pass(ChannelHandlerContext context, long until) {
        if (context.isRemoved()) {
            removed.reopen()
            held.each { ReferenceCountUtil.release(it) }
            return
        }
        if (!removed.isSettled() && System.nanoTime() < until) {
            context.executor().schedule({ pass(context, until) } as Runnable, SETTLING_MS, TimeUnit.MILLISECONDS)
            return
        }
        List<Object> messages = held
        held = null
        messages.each { context.fireChannelRead(it) }
    }

    /** The queue of the model that a request removes, where TorchServe will do so. */
    private ModelQueue removedBy(HttpRequest request) {
        List<String> words = path.tokenize('/')
        if (inference || request.method() != HttpMethod.DELETE || !(words.size() in 2..3) || words[0] != 'models'
                || !authorized(request, TokenAuthorization.TokenType.MANAGEMENT)) {
            return null
        }
        return Models.removable(words[1], words.size() == 3 ? words[2] : null)
    }

    /** Whether the request may go on; where not, it is answered, and what follows of it is thrown away. */
    private boolean accept(ChannelHandlerContext context, HttpRequest request) {
        receiving = true
        since = System.nanoTime()
        this.request = request
        if (!context.channel().isWritable()) {
            // 64 kB of answers wait to be read (or it is closed already): who asks on would have them pile up without end.
            refusing = true
            context.close()
            return false
        }
        ids.come(context.channel(), request)
        int query = request.uri().indexOf('?')
        path = query < 0 ? request.uri() : request.uri().substring(0, query)
        contentType = request.headers().get(HttpHeaderNames.CONTENT_TYPE) ?: ''
        long length = lengthOf(request)
        boolean body = length > 0 || HttpUtil.isTransferEncodingChunked(request)
        if (admission.draining) {
            return refuse(context, 503, 'ServiceUnavailableException', 'the server is stopping', true)
        }
        if (length < 0) {
            return refuse(context, 400, 'BadRequestException', 'the Content-Length is no number of bytes', true)
        }
        if (inference && path == PING && !body) {
            // Who watches the server needs no key.
            return health(context)
        }
        if (inference && body && !authorized(request, TokenAuthorization.TokenType.INFERENCE)) {
            return refuse(context, 400, 'InvalidKeyException', NO_TOKEN, length > admission.bodyBytes)
        }
        if (length > admission.bodyBytes) {
            String limit = "the request has $length bytes, and ${admission.bodyBytes} are allowed"
            return refuse(context, 413, 'RequestEntityTooLargeException', limit, true)
        }
        // Not before an answer that the connection still owes.
        FullHttpResponse full = inference && body && waiting == 0
                ? Overload.answer(request, path) : null
        if (full != null) {
            refusing = true
            send(context, full, !HttpUtil.isKeepAlive(request), true)
            return false
        }
        if (!admission.take(length)) {
            return refuse(context, 503, 'ServiceUnavailableException', Answers.NO_ROOM, false)
        }
        announced = length
        bytes += length
        waiting++
        ids.owe()
        admission.begin()
        removed = removedBy(request)
        removed?.close()
        return true
    }

    /**
     * The bytes that a request announces; -1: that is none. Netty (4.1.53) takes a length below zero for a body that ends
     * with the connection: it would need no token, and be counted as giving room back.
     */
    private static long lengthOf(HttpRequest request) {
        String said = request.headers().get(HttpHeaderNames.CONTENT_LENGTH)
        if (said == null) {
            return 0L
        }
        return LENGTH.matcher(said).matches() ? Long.parseLong(said) : -1L
    }

    /**
     * What 0.12 answers 200 to even where all workers are dead, and counts workers for that have not loaded; 503 where a
     * model has none.
     */
    private boolean health(ChannelHandlerContext context) {
        String word = Models.health()
        ByteBuf body = Unpooled.copiedBuffer("{\"status\": \"$word\"}\n".toString(), StandardCharsets.UTF_8)
        return reply(context, word == 'Unhealthy' ? 503 : 200, body, false, false)
    }

    private static boolean authorized(HttpRequest request, TokenAuthorization.TokenType kind) {
        if (!TokenAuthorization.isEnabled()) {
            return true
        }
        String header = request.headers().get(HttpHeaderNames.AUTHORIZATION)
        return header != null && TokenAuthorization.checkTokenAuthorization(
                TokenAuthorization.parseTokenFromBearerTokenHeader(header), kind)
    }

    /** Take the bytes that no header had announced. */
    private boolean takeMore(ChannelHandlerContext context, long count) {
        if (announced >= count) {
            announced -= count
            return true
        }
        long more = count - announced
        announced = 0
        if (admission.take(more)) {
            bytes += more
            return true
        }
        // Half of it lies with TorchServe: only the end of the connection takes it back.
        refuse(context, 503, 'ServiceUnavailableException', Answers.NO_ROOM, true)
        closeWhenAnswered = true
        return false
    }

    private boolean refuse(ChannelHandlerContext context, int status, String type, String message, boolean close) {
        return reply(context, status, Answers.error(status, type, message), close, true)
    }

    private boolean reply(ChannelHandlerContext context, int status, ByteBuf body, boolean close, boolean logged) {
        refusing = true
        send(context, Answers.of(status, body), close, logged)
        return false
    }

    private void send(ChannelHandlerContext context, FullHttpResponse answer, boolean close, boolean logged) {
        ids.refuse(answer, logged)
        HttpUtil.setContentLength(answer, answer.content().readableBytes())
        if (close) {
            answer.headers().set(HttpHeaderNames.CONNECTION, HttpHeaderValues.CLOSE)
        }
        io.netty.channel.ChannelFuture sent = context.writeAndFlush(answer)
        if (close) {
            // Not at once: who is still sending would see the end of the connection and not the answer.
            sent.addListener({ context.executor().schedule({ context.close() } as Runnable, 1, TimeUnit.SECONDS) }
                    as ChannelFutureListener)
        }
    }

    @Override
    void write(ChannelHandlerContext context, Object message, ChannelPromise promise) {
        Object answer = message
        if (message instanceof HttpResponse && ((HttpResponse) message).status().code() != 100) {
            if (removed != null && ((HttpResponse) message).status().code() != 200) {
                removed.reopen()
            }
            removed = null
            if (message instanceof FullHttpResponse) {
                answer = Answers.inWords((FullHttpResponse) message, contentType)
            }
            ids.answer((HttpResponse) answer)
            if (admission.draining || closeWhenAnswered) {
                closeWhenAnswered = true
                ((HttpResponse) answer).headers().set(HttpHeaderNames.CONNECTION, HttpHeaderValues.CLOSE)
            }
            promise = promise.unvoid()
            promise.addListener({ answered(context) } as ChannelFutureListener)
        }
        context.write(answer, promise)
    }

    private void answered(ChannelHandlerContext context) {
        since = receiving ? since : System.nanoTime()
        if (waiting > 0) {
            waiting--
            admission.end()
        }
        if (waiting == 0) {
            admission.give(bytes)
            bytes = 0
            if (closeWhenAnswered) {
                context.close()
            }
        }
    }

    /**
     * Close the connection of who does not go on: a request has to be whole within the time there is for one, and one has
     * to be under way. Looked into now and then, which costs a request nothing.
     */
    private void lookAgain(ChannelHandlerContext context, long afterMs) {
        context.executor().schedule({
            if (context.isRemoved()) {
                return
            }
            long left = admission.receiveMs - TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - since)
            boolean answering = waiting > 0 && !receiving
            if (!answering && left <= 0) {
                context.close()
            } else {
                lookAgain(context, answering ? admission.receiveMs : left)
            }
        } as Runnable, afterMs, TimeUnit.MILLISECONDS)
    }

    @Override
    void userEventTriggered(ChannelHandlerContext context, Object event) {
        if (event instanceof ChannelInputShutdownEvent) {
            if (waiting == 0 || receiving) {
                context.close()
            } else {
                closeWhenAnswered = true
            }
        }
        context.fireUserEventTriggered(event)
    }

    @Override
    void channelInactive(ChannelHandlerContext context) {
        receiving = false
        ids.end()
        for (; waiting > 0; waiting--) {
            admission.end()
        }
        admission.abandon(bytes)
        bytes = 0
        context.fireChannelInactive()
    }
}
