import groovy.transform.CompileStatic
import io.netty.buffer.Unpooled
import io.netty.channel.Channel
import io.netty.channel.ChannelFutureListener
import io.netty.channel.ChannelHandlerContext
import io.netty.channel.ChannelInboundHandlerAdapter
import io.netty.channel.ChannelOption
import java.nio.charset.StandardCharsets
import java.util.concurrent.TimeUnit

/**
 * Stands in a listening port's pipeline and puts a `Gate` into each connection's, behind its HTTP codec; a connection
 * that is one too many is told to try again.
 */
@CompileStatic
class Door extends ChannelInboundHandlerAdapter {
    private static final String BODY =
            '{"code":503,"type":"ServiceUnavailableException","message":"too many connections are open: try again"}'
    private static final String FULL = 'HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n' +
            "Content-Type: application/json\r\nContent-Length: ${BODY.length()}\r\n\r\n$BODY"

    private final Admission admission
    private final boolean inference

    Door(Admission admission, boolean inference) {
        this.admission = admission
        this.inference = inference
    }

    @Override
    void channelRead(ChannelHandlerContext context, Object connection) {
        Channel child = (Channel) connection
        // A client that shuts its sending side when it has said all still waits for the answer.
        child.config().setOption(ChannelOption.ALLOW_HALF_CLOSURE, true)
        boolean full = inference && !admission.connect()
        if (inference) {
            child.closeFuture().addListener({ admission.disconnect() } as ChannelFutureListener)
        }
        child.pipeline().addFirst(full ? new Refusal() : new Installer())
        context.fireChannelRead(connection)
    }

    private static class Refusal extends ChannelInboundHandlerAdapter {
        @Override
        void channelActive(ChannelHandlerContext context) {
            context.channel().config().setAutoRead(false)
            context.channel().config().setOption(ChannelOption.SO_LINGER, -1)  // see below
            context.writeAndFlush(Unpooled.copiedBuffer(FULL, StandardCharsets.US_ASCII))
            // Not at once: who is still sending would see the end of the connection and not the answer.
            context.executor().schedule({ context.close() } as Runnable, 1, TimeUnit.SECONDS)
        }
    }

    /** TorchServe fills the pipeline when the connection is registered, after this, and before it is active. */
    private class Installer extends ChannelInboundHandlerAdapter {
        @Override
        void channelActive(ChannelHandlerContext context) {
            // 0.12 says 0, with which closing throws away what the client has not read yet.
            context.channel().config().setOption(ChannelOption.SO_LINGER, -1)
            context.pipeline().addAfter('http', 'gate', new Gate(admission, inference))
            context.fireChannelActive()
            context.pipeline().remove(this)
        }
    }
}
